"""Backends that compute the gradients of a training step: this process alone, or with others (`ranks`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.task import Rows
from fedveil.contract.trainer import PerExampleGradients
from fedveil.data.batches import ExampleBatch
from fedveil.rng import RandomStream
from fedveil.training import per_example


class TrainableTask(Protocol):
    """The interface that a task offers to local training."""

    @property
    def config(self) -> RunConfig:
        """The train and run sections are read."""
        ...

    @property
    def spec(self) -> Spec:
        """Return the trained tensors."""
        ...

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Return the parameters behind the spec; they hold the values put in last."""
        ...

    def put(self, weights: Weights) -> None:
        """Puts weights in. Raises TaskError where they are not the spec's."""
        ...

    def taken(self, weights: Weights) -> Weights:
        """The trained parameters' values, the caller's own, on the device of `weights`, which were put in before."""
        ...

    def training(self, rng: RandomStream) -> contextlib.AbstractContextManager[None]:
        """Return a context for the training steps; its own random draws come from `rng`.

        Raises ConfigError where this model cannot have it.
        """
        ...

    def training_batch(self, rows: Rows) -> ExampleBatch:
        """One batch of a training step, on the CPU."""
        ...

    def loss_sum(self, batch: Any) -> Tensor:
        """Summed loss of a batch of `training_batch` on the parameters' device.

        Waits for nothing that the device computes.
        """
        ...

    def mean_loss(self, encoded: Rows) -> float:
        """Mean loss of the rows with the weights put in last."""
        ...


class GradientBackend(Protocol):
    """The gradients of training steps, and what is asked before them."""

    def training(self, dropout: RandomStream) -> contextlib.AbstractContextManager[None]:
        """Return a context for the steps. Raises ConfigError where the model cannot have it."""
        ...

    def batch(self, rows: Rows) -> ExampleBatch:
        """One batch of a step, on the CPU."""
        ...

    def backward(self, step: Sequence[ExampleBatch]) -> Tensor:
        """Set the trained parameters' gradients, none so far, to that of the mean loss over all terms of a step.

        Returns that loss, on the device.
        """
        ...

    def mean_loss(self, rows: Rows) -> float:
        """Mean loss of the rows with the weights put in last."""
        ...

    def gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        """See `per_example.per_example_gradients`."""
        ...


@final
class LocalBackend(GradientBackend):
    """This process computes all of it."""

    def __init__(self, task: TrainableTask) -> None:
        self._task = task

    @override
    def training(self, dropout: RandomStream) -> contextlib.AbstractContextManager[None]:
        return self._task.training(dropout)

    @override
    def batch(self, rows: Rows) -> ExampleBatch:
        return self._task.training_batch(rows)

    @override
    def backward(self, step: Sequence[ExampleBatch]) -> Tensor:
        terms = sum(batch.terms for batch in step)
        return reduce(torch.add, [add_gradient(self._task, batch, terms) for batch in step])

    @override
    def mean_loss(self, rows: Rows) -> float:
        return self._task.mean_loss(rows)

    @override
    def gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        return per_example.per_example_gradients(self._task, self._task.spec, rows, weights)


def add_gradient(task: TrainableTask, batch: ExampleBatch, terms: float) -> Tensor:
    """Add the gradient of a batch's summed loss divided by `terms`; return this quotient, on the device."""
    loss = task.loss_sum(batch) / terms
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
