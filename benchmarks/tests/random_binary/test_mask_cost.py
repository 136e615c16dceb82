"""The cost of a mask."""

from __future__ import annotations

import pytest

from fedveil_bench.random_binary import mask_cost
from fedveil_bench.runner import BenchOptions


def test_masking_measures_each_step():
    found = mask_cost.of_seed({"entries": 100_000, "rates": [0.5], "repeats": 2}, 0, BenchOptions())
    assert set(found) == {"R = 0.5", "copy"}
    assert {len(v) for v in found["R = 0.5"].values()} == {2}
    steps = {f"{step} {unit}" for step in ("draw", "pack", "unpack") for unit in ("seconds", "copies")}
    assert set(found["R = 0.5"]) == {"GB/s", "cpu seconds", "copies", *steps}


@pytest.mark.parametrize("copies,verdict", [(2.9, "held"), (3.1, "NOT HELD")])
def test_on_a_gpu_the_bound_is_three_copies(monkeypatch, copies, verdict):
    rates = {"GB/s": [2.0], "copies": [copies], "draw copies": [0.5], "pack copies": [1.0], "unpack copies": [1.25]}
    monkeypatch.setattr(mask_cost.seeds, "run_seeds", lambda *_: [{"R = 0.2": rates, "copy": {"GB/s": [9.0]}}])
    on_cpu, on_gpu = (mask_cost.run_benchmark({"repeats": 1}, BenchOptions(device=d)).verdicts for d in ("cpu", "cuda"))
    assert len(on_cpu) == 1
    assert on_gpu[1] == (
        "R = 0.2, in copies of the gradient on the GPU: drawn 0.50, packed 1.00, unpacked 1.25, together "
        f"{copies:.2f} (asked: at most 3: {verdict})."
    )
