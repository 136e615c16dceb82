"""The loss as a score.

What training changed: a row that the base already knew is no member for its low loss.
"""

from __future__ import annotations

import torch

from fedveil.attacks.base import ModelOutput
from fedveil.attacks.membership.loss import CalibratedLossAttack, LossAttack
from fedveil.contract.task import ExamplePrediction


def test_a_low_loss_is_a_member_whatever_the_base_says():
    prediction = ExamplePrediction({"target": torch.zeros(1, 2)}, torch.tensor([0]))
    assert LossAttack().score(ModelOutput(prediction, loss=0.7, base_loss=2.5)) == {"loss": -0.7}


def test_a_fall_of_the_loss_is_a_member():
    prediction = ExamplePrediction({"target": torch.zeros(1, 2)}, torch.tensor([0]))
    assert CalibratedLossAttack().score(ModelOutput(prediction, loss=0.75, base_loss=2.5)) == {"calibrated": 1.75}
    assert CalibratedLossAttack().score(ModelOutput(prediction, loss=0.75, base_loss=0.75)) == {"calibrated": 0.0}
