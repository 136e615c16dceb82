"""Per-example gradients, batched if the task has a per-example loss (`per_example.PerExampleLoss`).

| case | method |
|---|---|
| the training loss covers only the example's own target, and the base is not quantized | a training batch at a time,
  with torch.func |
| any other task, or a model that torch.func does not support (logged once) | one example at a time |

At most `MOST_BYTES` are in memory at once: the gradients and the memory for their backward passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedveil.contract.task import Rows
from fedveil.errors import TaskError
from fedveil.models.library_logging import first_line
from fedveil.training import per_example

__all__ = ["MOST_BYTES", "row_gradient", "row_gradients"]

MOST_BYTES = 1 << 28


def row_gradients(task: Any, rows: Rows) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield each example's index and the gradient of its summed loss at the current weights, on the CPU.

    The order differs from the order of `rows`: examples of similar length are computed together.
    """
    sizes = _sizes(task, rows)
    if sizes is None:
        yield from ((place, row_gradient(task, rows[place])) for place in range(len(rows)))
        return
    weights = {name: p.detach() for name, p in task.trained.items()}
    size = max(1, min(task.config.train.batch_size, MOST_BYTES // sum(w.nbytes for w in weights.values())))
    order = sorted(range(len(rows)), key=sizes.__getitem__)
    for begin in range(0, len(order), size):
        places = order[begin : begin + size]
        yield from zip(places, _together(task, weights, [rows[place] for place in places]), strict=True)


def row_gradient(task: Any, row: Any) -> dict[str, Tensor]:
    """Return one example's gradient at the current weights, on the CPU, without tensors that don't affect its loss."""
    for parameter in task.trained.values():
        parameter.grad = None
    task.loss_sum(task.collate([row]).to(task.device)).backward()
    gradients = {name: p.grad.detach().cpu() for name, p in task.trained.items() if p.grad is not None}
    for parameter in task.trained.values():
        parameter.grad = None
    return gradients


def _sizes(task: Any, rows: Rows) -> list[int] | None:
    """Return each example's length.

    Returns None unless `sample_loss` is the mean of `loss_sum` and torch.func can differentiate it.
    """
    if len(rows) < 2 or not isinstance(task, per_example.PerExampleLoss):
        return None
    train = task.config.train  # type: ignore[attr-defined]  # a task with a per-example loss has a training config
    if train.loss_mask != "targets" or train.packing or train.quantized_base != "none":
        return None
    try:
        return [task.samples([row])[0].numel() for row in rows]
    except TaskError:  # a prompt whose loss depends on values in a branch
        return None


def _together(task: Any, weights: dict[str, Tensor], rows: Rows) -> Iterator[dict[str, Tensor]]:
    terms = [task.collate([row]).terms for row in rows]
    try:
        gradients = per_example.gradients_of_examples(task, task.samples(rows), task.spec, weights).gradients
    except (RuntimeError, TaskError) as error:
        warnings.warn(f"computing per-example gradients one example at a time: {first_line(error)}", stacklevel=2)
        yield from (row_gradient(task, row) for row in rows)
        return
    for place, count in enumerate(terms):  # without targets the mean is undefined, and the sum is 0
        yield {
            name: count * g[place].cpu() if count else torch.zeros_like(g[place]).cpu() for name, g in gradients.items()
        }
