"""Steps on rows apart: which rows a step takes, and the gradient of each row's own loss.

A task that offers `SampleLoss` has them. Its loss must be a pure function of the weights and one row, so that
torch.func can differentiate all rows of a batch at once. Memory: the rows' gradients and what their backward passes
hold, linear in the batch.

Where the rows meet the weights only in features T (n x m) that the weights make alone (`FeatureLoss`), row i's gradient
in T has rank one, l_i r_i^T, and its norm is |l_i| |r_i|: a row needs no backward pass of its own. Time and memory: one
backward pass, and n + m numbers a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.contract.budget import Sampling, check_batch
from fedveil.contract.spec import Spec, Weights, movable
from fedveil.contract.task import Rows
from fedveil.contract.trainer import Batch, FeatureGradients, PerSample, RowGradients
from fedveil.errors import TaskError
from fedveil.rng import Stream
from fedveil.training.threads import threads


@runtime_checkable
class SampleLoss(Protocol):
    """What a task offers beside `computing.Trainable` where rows can be told apart."""

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """The rows as tensors on the model's device, each with the rows as its first dimension."""
        ...

    def sample_loss(self, weights: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        """The loss of one row, a scalar: pure, without branches on values; `sample` lacks the first dimension."""
        ...


@runtime_checkable
class FeatureLoss(Protocol):
    """What a task offers where a row's loss is a function of the row and of features that the weights make alone."""

    def samples(self, rows: Rows) -> tuple[Tensor, ...]:
        """See SampleLoss."""
        ...

    def features(self, weights: Mapping[str, Tensor]) -> Tensor:
        """T (n x m) on the model's device, from weights on any; pure, and differentiable by torch.func.

        Raises TaskError where this adapter has none.
        """
        ...

    def factors(self, features: Tensor, *samples: Tensor) -> tuple[Tensor, Tensor]:
        """l (rows x n) and r (rows x m): the gradient of row i's loss in T is l_i r_i^T."""
        ...


@final
class LocalRows(RowGradients):
    """The row gradients of one client. train.accumulate has no part in them.

    `by` computes those of whole weights: `gradients`, where it is None.
    """

    def __init__(self, task: Any, rows: Rows, by: Callable[[Rows, Weights], PerSample] | None = None) -> None:
        self._task, self._rows = task, rows
        self._by = by or (lambda chosen, weights: gradients(task, task.spec, chosen, weights))

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
        """Raises ConfigError for a batch that is larger than the site."""
        train = self._task.config.train
        return steps(len(self._rows), train.batch_size, train.epochs, train.max_steps)

    @override
    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        return draw(sampling, len(self._rows), self.batch_size, steps, rng, skip)

    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        with threads(self._task.config):
            return self._by([self._rows[i] for i in batch.rows], weights)

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        with threads(self._task.config):
            found = feature_gradients(self._task, self._task.spec, [self._rows[i] for i in batch.rows], weights)

        def pull(gradient: Tensor) -> Weights:
            with threads(self._task.config):
                return found.pull(gradient)

        return FeatureGradients(found.left, found.right, pull)


def steps(num_examples: int, batch_size: int, epochs: int, max_steps: int) -> int:
    """Steps of a participation: whole batches only. Raises ConfigError for a batch that is larger than the site."""
    check_batch(batch_size, num_examples)
    planned = epochs * (num_examples // batch_size)
    return min(planned, max_steps) if max_steps else planned


def draw(sampling: Sampling, num_examples: int, batch_size: int, count: int, rng: Stream, skip: int = 0) -> list[Batch]:
    """See `RowGradients.batches`. Raises ConfigError for a batch that is larger than the site."""
    check_batch(batch_size, num_examples)
    if sampling == "poisson":
        taken = rng.bernoulli(batch_size / num_examples, (skip + count, num_examples))[skip:]
        return [Batch(tuple(torch.nonzero(row).flatten().tolist())) for row in taken]
    if sampling == "fixed":
        return [Batch(tuple(rng.choice(num_examples, batch_size))) for _ in range(skip + count)][skip:]
    an_epoch = num_examples // batch_size
    found: list[Batch] = []
    for _ in range(math.ceil((skip + count) / an_epoch)):
        order = rng.choice(num_examples, num_examples)
        found += [Batch(tuple(order[i * batch_size : (i + 1) * batch_size])) for i in range(an_epoch)]
    return found[skip : skip + count]


def gradients(task: object, spec: Spec, rows: Rows, weights: Weights) -> PerSample:
    """The gradient of each row's own loss at `weights`, on the weights' device.

    Raises:
        TaskError: weights that are not the spec's, or a task that has no loss of a single row.
    """
    if not isinstance(task, SampleLoss):
        raise TaskError(
            f"task.name: expected a task with a loss of every single row, found {type(task).__name__}; this method "
            "needs one that trains a prompt"
        )
    _check(weights, spec)
    home = next(iter(weights.values())).device
    if not rows:
        return PerSample(
            {n: torch.zeros((0, *spec[n].shape), device=home) for n in movable(spec)}, torch.zeros(0, device=home)
        )
    found = of_samples(task, task.samples(rows), spec, weights)
    return PerSample({name: g.to(home) for name, g in found.gradients.items()}, found.losses.to(home))


def of_samples(task: SampleLoss, samples: Sequence[Tensor], spec: Spec, weights: Weights) -> PerSample:
    """As `gradients`, of what `SampleLoss.samples` made of the rows, on its device."""
    there = {name: w.detach().to(samples[0].device) for name, w in weights.items()}
    moved = {name: there.pop(name) for name in movable(spec)}

    def loss(free: Mapping[str, Tensor], *sample: Tensor) -> Tensor:
        return task.sample_loss({**there, **free}, *sample)

    each: Any = torch.func.vmap(
        torch.func.grad_and_value(loss), in_dims=(None, *(0 for _ in samples)), randomness="error"
    )
    found, losses = each(moved, *samples)
    return PerSample({name: g.detach() for name, g in found.items()}, losses.detach())


def feature_gradients(task: object, spec: Spec, rows: Rows, weights: Weights) -> FeatureGradients:
    """See `RowGradients.feature`; on the weights' device.

    Raises:
        TaskError: weights that are not the spec's, or a task or an adapter without such features.
    """
    if not isinstance(task, FeatureLoss):
        raise TaskError(
            f"task.name: expected a task whose rows meet the weights in features alone, found {type(task).__name__}; "
            "use clip-prompt, or clip every row's whole gradient"
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
        (found,) = back(gradient.to(features.device, features.dtype))
        return {name: g.detach().to(home) for name, g in found.items()}

    return FeatureGradients(left.to(home), right.to(home), pull)


def _check(weights: Weights, spec: Spec) -> None:
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if shapes != {name: t.shape for name, t in spec.items()}:
        raise TaskError(f"weights: expected { ({n: t.shape for n, t in spec.items()}) }, found {shapes}")
