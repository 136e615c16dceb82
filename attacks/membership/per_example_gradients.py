"""The gradients of single rows, many at a time where the task tells rows apart (`per_example.PerExampleLoss`).

| what | how |
|---|---|
| the loss that steps take is the target's alone, of a row by itself, on a base that is not quantised | a batch of
  training's rows at once, by torch.func |
| any other task, and a model that torch.func cannot take (said once) | row by row |

Of at most `MOST_BYTES` at once: what is held is those gradients, and what their backward passes hold.
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
    """Each row's place and the gradient of its summed loss at the weights put in last, on the CPU.

    Not in the order of the rows: those of like length are computed together.
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
    """The gradient of one row's loss at the weights put in last, on the CPU; without tensors that it does not reach."""
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
    train = task.config.train  # type: ignore[attr-defined]  # a task of rows apart has local training's config
    if train.loss_mask != "targets" or train.packing or train.quantized_base != "none":
        return None
    try:
        return [task.samples([row])[0].numel() for row in rows]
    except TaskError:  # a prompt whose loss branches on values
        return None


def _together(task: Any, weights: dict[str, Tensor], rows: Rows) -> Iterator[dict[str, Tensor]]:
    terms = [task.collate([row]).terms for row in rows]
    try:
        gradients = per_example.gradients_of_examples(task, task.samples(rows), task.spec, weights).gradients
    except RuntimeError as error:
        warnings.warn(f"gradients of rows, one row at a time: {first_line(error)}", stacklevel=2)
        yield from (row_gradient(task, row) for row in rows)
        return
    for place, count in enumerate(terms):  # of a row without targets the mean is none, and the sum 0
        yield {
            name: count * g[place].cpu() if count else torch.zeros_like(g[place]).cpu() for name, g in gradients.items()
        }
