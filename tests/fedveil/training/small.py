"""The bundled text model, small pairs and run config keys, shared by the tests of local training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedveil import config as run_config
from fedveil.adapters.lora import LoraAdapter
from fedveil.data.batches import TokenExample
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration

DATA = Path(__file__).parents[3] / "data" / "e2e"
KEY = bytes(range(32))


def make(device: str = "cpu", **keys: object) -> TextGeneration:
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    task = load_task(run_config.parse(flat), LoraAdapter(rank=3, alpha=6.0), device)
    assert isinstance(task, TextGeneration)
    return task


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far two trainings, of any device, end from each other, beside how far the first went from `start`."""
    norms = [float(torch.stack([(one[n].cpu() - to[n].cpu()).norm() for n in start]).norm()) for to in (other, start)]
    return norms[0] / norms[1]


def gradients(task: TextGeneration, rows: list[TokenExample]) -> dict[str, torch.Tensor]:
    """Of the mean loss of one batch; the parameters are left without."""
    batch = task.collate(rows)
    (task.loss_sum(batch) / batch.terms).backward()
    gradient_copies = {name: p.grad.clone() for name, p in task.trained.items()}
    for p in task.trained.values():
        p.grad = None
    return gradient_copies
