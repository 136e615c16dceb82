"""The server that combines several rounds, on a tensor of one entry."""

from __future__ import annotations

import math

import pytest
import torch

from fedveil_bench.broadcast.imprint import BroadcastCase
from fedveil_bench.broadcast.ramp import RampingServer


@pytest.fixture
def server() -> RampingServer:
    case = object.__new__(BroadcastCase)
    case.initial = {"a": torch.tensor([1.0])}
    return RampingServer(case, "a", 20.0)


# From 1, a change of 1 doubles the weights: 2, 4, 8. A change of 0.5 gives 1.5, 2.25, 3.375.
@pytest.mark.parametrize(
    ("target", "bounds", "least"),
    [
        (8.0, {}, 1),
        (8.0, {"change": 1.0}, 3),
        (3.375, {"change": 0.5}, 3),
        (3.38, {"change": 0.5}, 4),
        (8.0, {"change": 1.0, "drift": 7.0}, 3),
        (8.0, {"change": 1.0, "drift": 6.99}, math.inf),
        (8.0, {"drift": 6.99}, math.inf),
    ],
)
def test_a_target_is_reached_in_as_few_rounds_as_the_bounds_permit(target, bounds, least, server):
    for rounds in (1, 2, 3, 4, 16):
        assert server.is_reached({"a": torch.tensor([target])}, bounds, rounds) == (rounds >= least)
