"""Backends that compute a training step's gradients, in this process alone or together with other processes
(`ranks`)."""

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
        """Return the run config; only its train and run sections are read."""
        ...

    @property
    def spec(self) -> Spec:
        """Return the trained tensors."""
        ...

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Return the parameters in the spec; they hold the most recently loaded values."""
        ...

    def put(self, weights: Weights) -> None:
        """Load weights. Raises TaskError if they do not match the spec."""
        ...

    def taken(self, weights: Weights) -> Weights:
        """Return the trained values, owned by the caller, on the device of `weights`, which are already loaded."""
        ...

    def training(self, rng: RandomStream) -> contextlib.AbstractContextManager[None]:
        """Return a context for the training steps; its own random draws come from `rng`.

        Raises ConfigError if this model does not support it.
        """
        ...

    def training_batch(self, rows: Rows) -> ExampleBatch:
        """Return one batch of a training step, on the CPU."""
        ...

    def loss_sum(self, batch: Any) -> Tensor:
        """Return the summed loss of a batch from `training_batch` on the parameters' device.

        This does not wait for the device.
        """
        ...

    def mean_loss(self, encoded: Rows) -> float:
        """Return the mean loss of the examples with the most recently loaded weights."""
        ...


class GradientBackend(Protocol):
    """Computes the gradients of training steps, and the inputs that the steps need."""

    def training(self, dropout: RandomStream) -> contextlib.AbstractContextManager[None]:
        """Return a context for the steps. Raises ConfigError if the model does not support it."""
        ...

    def batch(self, rows: Rows) -> ExampleBatch:
        """Return one batch of a step, on the CPU."""
        ...

    def backward(self, step: Sequence[ExampleBatch]) -> Tensor:
        """Set the trained parameters' gradients, which must be unset, to those of a step's mean loss over all terms.

        Returns that loss, on the device.
        """
        ...

    def mean_loss(self, rows: Rows) -> float:
        """Return the mean loss of the examples with the most recently loaded weights."""
        ...

    def gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        """See `per_example.per_example_gradients`."""
        ...


@final
class LocalBackend(GradientBackend):
    """Computes everything in this process."""

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
    """Accumulate the gradient of a batch's summed loss divided by `terms`; return that quotient, on the device."""
    loss = task.loss_sum(batch) / terms
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
