"""Settings of an accuracy table that trains in seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tests.random_binary.noise import VIT
from fedveil.config import parse
from fedveil.tasks.image_classification import ImageClassification
from fedveil_bench.common.federations import task_of
from fedveil_bench.random_binary.vit import from_scratch
from fedveil_bench.runner import BenchOptions

METHODS = {
    "plain": {"name": "random_binary", "fields": "rate = 0.0", "rate": 0.0},
    "random": {"name": "random_binary", "fields": "rate = 0.8", "rate": 0.8},
    "locked": {"name": "random_binary", "fields": "rate = 0.8\nmask_period = 'never'", "rate": 0.8},
    "fixed": {"name": "fixed_position"},
}


def settings(**more: Any) -> dict[str, Any]:
    """Of two clients and 2 epochs of 2 steps, on noise."""
    return {
        "data": "noise", "classes": 3, "clients": 2, "epochs": 2, "exchanges": 2, "test_rows": 12, "model": VIT,
        "fields": "optimiser = 'adam'\nlearning_rate = 1e-2\n", "methods": METHODS, "claims": [],
        "config": {"train.batch-size": 2, "train.epochs": 2},
        "bases": {"scratch": {"seeds": 1, "members": 8, "methods": ["random", "locked", "fixed"]}},
    } | more  # fmt: skip


def section() -> dict[str, Any]:
    """The task section of the small ViT."""
    return from_scratch(VIT, 3, Path(tempfile.mkdtemp()))


def bare_task() -> ImageClassification:
    """The task of the small ViT."""
    flat = {**section(), "method.name": "random_binary", "run.deterministic": True}
    return task_of(ImageClassification, parse(flat), BenchOptions(device="cpu"))
