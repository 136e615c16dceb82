"""The loss as a score."""

from __future__ import annotations

import torch

from fedveil.attacks.base import Answer
from fedveil.attacks.membership.loss import Loss
from fedveil.contract.task import Prediction


def test_a_low_loss_is_a_member_whatever_the_base_says():
    prediction = Prediction({"target": torch.zeros(1, 2)}, torch.tensor([0]))
    assert Loss().score(Answer(prediction, loss=0.7, base_loss=2.5)) == {"loss": -0.7}
