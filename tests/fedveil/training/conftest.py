"""Fixtures: the small task, its rows and its initial weights."""

from __future__ import annotations

import pytest
import torch

from fedveil import config as run_config
from fedveil.data.batches import TokenExample
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training.threads import limit_threads
from tests.fedveil.training.small import DATA, make


@pytest.fixture(scope="module")
def task() -> TextGeneration:
    return make()


@pytest.fixture
def configured(task, monkeypatch):
    """The one loaded task under other keys: a base costs more to load than to train here."""

    def configure(**keys: object) -> TextGeneration:
        flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
        monkeypatch.setattr(task, "config", run_config.parse(flat))
        return task

    return configure


@pytest.fixture
def one_thread():
    """How a sum is split over threads shows in its last bits."""
    with limit_threads(run_config.parse({"run.deterministic": True})):
        yield


@pytest.fixture(scope="module")
def rows(task) -> list[TokenExample]:
    return task.encode(task.examples(DATA, "train")[:29])


@pytest.fixture(scope="module")
def start(task) -> dict[str, torch.Tensor]:
    """No zero factor: with B = 0 the gradient of A is 0, and an error in it would not show."""
    generator = torch.Generator().manual_seed(271828)
    return {n: 0.05 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}
