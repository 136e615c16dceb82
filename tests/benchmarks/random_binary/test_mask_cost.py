"""What a mask costs."""

from __future__ import annotations

from fedveil.benchmarks.random_binary import mask_cost
from fedveil.benchmarks.run import Options


def test_masking_measures_each_step():
    found = mask_cost.of_seed({"entries": 100_000, "rates": [0.5], "repeats": 2}, 0, Options())
    assert set(found) == {"R = 0.5", "copy"}
    assert {len(v) for v in found["R = 0.5"].values()} == {2}
    assert set(found["R = 0.5"]) == {"GB/s", "cpu seconds", "draw seconds", "pack seconds", "unpack seconds"}
