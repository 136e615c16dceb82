"""Accuracy by epoch, and how often entries move by Eq. 13."""

from __future__ import annotations

import pytest
import torch

from fedveil.benchmarks.random_binary import accuracy
from fedveil.benchmarks.run import Options
from tests.benchmarks.random_binary.noise import VIT


def federate(methods, **more):
    settings = {
        "data": "noise", "classes": 3, "clients": 2, "epochs": 2, "public": 4, "members": 8, "test_rows": 12,
        "seeds": 1,
        "bases": ["pre-trained", "scratch"], "fields": "optimiser = 'adam'\nlearning_rate = 1e-2\n", "model": VIT,
        "config": {"train.batch-size": 2, "train.epochs": 2}, "methods": methods, **more,
    }  # fmt: skip
    return accuracy.of_seed(settings, 0, Options())


def test_accuracy_and_counts_of_a_small_federation():
    random, locked = (
        {"name": "random_binary", "fields": f"rate = 0.8\n{p}", "rate": 0.8} for p in ("", "mask_period = 'never'")
    )
    found = federate({"random": random, "locked": locked, "fixed": {"name": "fixed_position"}})
    assert list(found) == [
        f"{base}, {row}" for base in ("pre-trained", "scratch") for row in ("epoch 0", "random", "locked", "fixed")
    ]
    assert [len(epoch) for epoch in found["scratch, random"]["right"]] == [12, 12, 12]
    assert found["pre-trained, random"]["right"] != found["scratch, random"]["right"]
    for name in ("random", "locked"):
        row = found[f"scratch, {name}"]
        assert row["expected"] == pytest.approx(1 - 0.8**2)
        assert row["entries moved"] == pytest.approx(row["expected"], abs=0.03)
        assert row["count distance"] < 0.03
    assert "expected" not in found["scratch, fixed"]


def test_count_distance_tells_the_two_laws_apart():
    generator = torch.Generator().manual_seed(0)
    often = {"w": torch.rand(4, 20_000, generator=generator).gt(0.3).sum(0).float()}
    assert accuracy._counted(often, 4, 0.3, locked=False)["count distance"] < 0.02
    assert accuracy._counted(often, 4, 0.3, locked=True)["count distance"] > 0.6


def test_pre_training_leaves_no_head():
    trained, other = ({n: torch.full((2,), v) for n in ("classifier.weight", "vit.x")} for v in (1.0, 2.0))
    assert {n: float(w[0]) for n, w in accuracy._new_head(trained, other).items()} == {
        "classifier.weight": 2.0, "vit.x": 1.0,
    }  # fmt: skip
