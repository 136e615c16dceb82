"""What training changed: a row that the base already knew is no member for its low loss."""

from __future__ import annotations

import torch

from fedveil.attacks.base import Answer
from fedveil.attacks.membership.calibrated import Calibrated
from fedveil.contract.task import Prediction


def test_a_fall_of_the_loss_is_a_member():
    prediction = Prediction({"target": torch.zeros(1, 2)}, torch.tensor([0]))
    assert Calibrated().score(Answer(prediction, loss=0.75, base_loss=2.5)) == {"calibrated": 1.75}
    assert Calibrated().score(Answer(prediction, loss=0.75, base_loss=0.75)) == {"calibrated": 0.0}
