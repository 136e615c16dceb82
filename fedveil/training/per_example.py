"""Per-example steps: the examples in each step, and the gradient of each example's own loss.

Tasks support them by implementing `PerExampleLoss`. The loss must be a pure function of the weights and one example, so
that torch.func can differentiate all examples in a batch at once. Memory grows linearly with the batch: the per-example
gradients, and the values stored for their backward passes.

If the examples interact with the weights only through features T (n x m) of the weights (`PerExampleFeatureLoss`), the
gradient of example i with respect to T has rank one, l_i r_i^T, and its norm is |l_i| |r_i|. So no example needs its
own backward pass. Time and memory: one backward pass, and n + m numbers per example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.contract.param_spec import Spec, Weights, movable_names
from fedveil.contract.privacy import Sampling, check_batch
from fedveil.contract.task import Rows
from fedveil.contract.trainer import (
    BatchIndices,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
)
from fedveil.errors import FedVeilError, TaskError
from fedveil.rng import RandomStream
from fedveil.training.threads import limit_threads

__all__ = [
    "DifferentiatesRows",
    "LocalGradientSource",
    "PerExampleFeatureLoss",
    "PerExampleLoss",
    "count_steps",
    "draw_batches",
    "feature_gradients",
    "gradients_of_examples",
    "per_example_gradients",
]


@runtime_checkable
class PerExampleLoss(Protocol):
    """The interface that a task with a per-example loss adds to `gradient_backend.TrainableTask`."""

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the examples as tensors on the model's device; the first dimension of each indexes the examples."""
        ...

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """Return one example's loss, a scalar: pure, without branches on values; `sample` lacks the first dimension."""
        ...


@runtime_checkable
class DifferentiatesRows(Protocol):
    """The interface of a task that differentiates its rows in its own way, for cases where vmap may not apply."""

    def example_gradients(self, rows: Rows, weights: Weights) -> PerExampleGradients:
        """Return the gradient of each row's own loss at `weights`, on the model's device."""
        ...


@runtime_checkable
class PerExampleFeatureLoss(Protocol):
    """The interface of a task whose example loss depends only on the example and on features of the weights."""

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """See PerExampleLoss."""
        ...

    def features(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return T (n x m) on the model's device, from weights on any device; pure, and differentiable by torch.func.

        Raises TaskError if this adapter has no features.
        """
        ...

    def factors(self, features: Tensor, *samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return l (rows x n) and r (rows x m): the gradient of row i's loss with respect to T is l_i r_i^T."""
        ...


@final
class LocalGradientSource(PerExampleGradientSource):
    """The per-example gradients of one client. train.gradient-accumulation-steps does not affect them.

    `by` computes gradients with respect to the full weights; if None, `per_example_gradients` does.
    """

    def __init__(self, task: Any, rows: Rows, by: Callable[[Rows, Weights], PerExampleGradients] | None = None) -> None:
        self._task, self._rows = task, rows
        self._by = by or (lambda chosen, weights: per_example_gradients(task, task.spec, chosen, weights))

    @property
    @override
    def num_examples(self) -> int:
        return len(self._rows)

    @property
    @override
    def batch_size(self) -> int:
        return int(self._task.config.train.batch_size)

    @property
    @override
    def steps(self) -> int:
        """Return the number of steps. Raises ConfigError if the batch is larger than the site's data."""
        train = self._task.config.train
        return count_steps(len(self._rows), train.batch_size, train.epochs, train.max_steps)

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        return draw_batches(sampling, len(self._rows), self.batch_size, steps, rng, skip)

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        with limit_threads(self._task.config):
            return self._by([self._rows[i] for i in batch.rows], weights)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        with limit_threads(self._task.config):
            feature_grads = feature_gradients(self._task, self._task.spec, [self._rows[i] for i in batch.rows], weights)

        def pull(gradient: Tensor) -> Weights:
            with limit_threads(self._task.config):
                return feature_grads.pull(gradient)

        return PerExampleFeatureGradients(feature_grads.left, feature_grads.right, pull)


def count_steps(num_examples: int, batch_size: int, epochs: int, max_steps: int) -> int:
    """Return the steps per participation, in whole batches. Raises ConfigError if a batch is larger than the data."""
    check_batch(batch_size, num_examples)
    planned = epochs * (num_examples // batch_size)
    return min(planned, max_steps) if max_steps else planned


def draw_batches(
    sampling: Sampling, num_examples: int, batch_size: int, count: int, rng: RandomStream, skip: int = 0
) -> list[BatchIndices]:
    """See `PerExampleGradientSource.batches`. Raises ConfigError if the batch is larger than the site's data."""
    check_batch(batch_size, num_examples)
    if sampling == "poisson":
        taken = rng.bernoulli(batch_size / num_examples, (skip + count, num_examples))[skip:]
        return [BatchIndices(tuple(torch.nonzero(row).flatten().tolist())) for row in taken]
    if sampling == "fixed":
        return [BatchIndices(tuple(rng.choice(num_examples, batch_size))) for _ in range(skip + count)][skip:]
    an_epoch = num_examples // batch_size
    batches: list[BatchIndices] = []
    for _ in range(math.ceil((skip + count) / an_epoch)):
        order = rng.choice(num_examples, num_examples)
        batches += [BatchIndices(tuple(order[i * batch_size : (i + 1) * batch_size])) for i in range(an_epoch)]
    return batches[skip : skip + count]


def per_example_gradients(task: object, spec: Spec, rows: Rows, weights: Weights) -> PerExampleGradients:
    """Return the gradient of each example's own loss at `weights`, on the weights' device.

    Raises:
        TaskError: weights that do not match the spec, or a task without a per-example loss.
    """
    if not isinstance(task, PerExampleLoss):
        raise TaskError(
            f"task.name: {type(task).__name__} has no per-example loss; this method needs a task that trains a prompt"
        )
    _check(weights, spec)
    home = next(iter(weights.values())).device
    if not rows:
        return PerExampleGradients(
            {n: torch.zeros((0, *spec[n].shape), device=home) for n in movable_names(spec)}, torch.zeros(0, device=home)
        )
    if isinstance(task, DifferentiatesRows):
        result = task.example_gradients(rows, weights)
    else:
        result = gradients_of_examples(task, task.samples(rows), spec, weights)
    return PerExampleGradients({name: g.to(home) for name, g in result.gradients.items()}, result.losses.to(home))


def gradients_of_examples(
    task: PerExampleLoss, samples: Sequence[Tensor], spec: Spec, weights: Weights
) -> PerExampleGradients:
    """Compute `per_example_gradients` from the output of `PerExampleLoss.samples`, on its device."""
    there = {name: w.detach().to(samples[0].device) for name, w in weights.items()}
    moved = {name: there.pop(name) for name in movable_names(spec)}

    def loss(free: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        return task.sample_loss({**there, **free}, *sample)

    each: Any = torch.func.vmap(
        torch.func.grad_and_value(loss), in_dims=(None, *(0 for _ in samples)), randomness="error"
    )
    try:
        gradients, losses = each(moved, *samples)
    except (FedVeilError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch raises RuntimeError, NotImplementedError, GuardOnDataDependentSymNode, ...
        kind = type(getattr(getattr(task, "base", None), "model", task)).__name__
        raise TaskError(
            f"task.model: dp.* requires per-example gradients, but torch.func raises {type(error).__name__} for "
            f"{kind}; use another base, or train without dp.*"
        ) from None
    return PerExampleGradients({name: g.detach() for name, g in gradients.items()}, losses.detach())


def feature_gradients(task: object, spec: Spec, rows: Rows, weights: Weights) -> PerExampleFeatureGradients:
    """See `PerExampleGradientSource.feature`; on the weights' device.

    Raises:
        TaskError: weights that do not match the spec, or a task or adapter without such features.
    """
    if not isinstance(task, PerExampleFeatureLoss):
        raise TaskError(
            f"task.name: the losses of {type(task).__name__} do not depend on the weights only through features; "
            "use clip-prompt, or clip every example's whole gradient"
        )
    _check(weights, spec)
    home = next(iter(weights.values())).device
    inputs = task.samples(rows) if rows else ()
    vjp: Any = torch.func.vjp
    features, back = vjp(task.features, {name: w.detach() for name, w in weights.items()})
    if inputs:
        left, right = task.factors(features.detach(), *inputs)
    else:
        left, right = (torch.zeros((0, size), device=features.device) for size in features.shape)

    def pull(gradient: Tensor) -> Weights:
        (weight_gradients,) = back(gradient.to(features.device, features.dtype))
        return {name: g.detach().to(home) for name, g in weight_gradients.items()}

    return PerExampleFeatureGradients(left.to(home), right.to(home), pull)


def _check(weights: Weights, spec: Spec) -> None:
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if shapes != {name: t.shape for name, t in spec.items()}:
        raise TaskError(f"weights: expected shapes { ({n: t.shape for n, t in spec.items()}) }, found {shapes}")
