"""Wrappers that pass every call to a trainer or its gradient source, and a trainer with per-example gradients only."""

from __future__ import annotations

from typing_extensions import override

from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import Sampling
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    Trainer,
    TrainingResult,
)
from fedveil.rng import RandomStream

__all__ = ["PerExampleTrainerWrapper", "TrainerWrapper", "WrappedGradientSource"]


class TrainerWrapper(Trainer):
    """A wrapper that passes every call to `trainer`. Subclasses that inspect single examples also override `rows`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    @override
    def num_examples(self) -> int:
        """Return the wrapped trainer's number of examples."""
        return self._trainer.num_examples

    @property
    @override
    def spec(self) -> Spec:
        """Return the wrapped trainer's spec."""
        return self._trainer.spec

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        """Return the wrapped trainer's gradient source."""
        return self._trainer.rows

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Train with the wrapped trainer."""
        return self._trainer.train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Return the wrapped trainer's gradient."""
        return self._trainer.gradient(weights)


class PerExampleTrainerWrapper(Trainer):
    """A trainer that offers only per-example gradients, so that callers cannot train on the examples any other way."""

    def __init__(self, spec: Spec, rows: PerExampleGradientSource) -> None:
        self._spec, self._rows = spec, rows

    @property
    @override
    def num_examples(self) -> int:
        """Return the source's number of examples."""
        return self._rows.num_examples

    @property
    @override
    def spec(self) -> Spec:
        """Return the given spec."""
        return self._spec

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        """Return the given gradient source."""
        return self._rows


class WrappedGradientSource(PerExampleGradientSource):
    """Passes every call to `rows`."""

    def __init__(self, rows: PerExampleGradientSource) -> None:
        self._rows = rows

    @property
    @override
    def num_examples(self) -> int:
        """Return the wrapped source's number of examples."""
        return self._rows.num_examples

    @property
    @override
    def batch_size(self) -> int:
        """Return the wrapped source's batch size."""
        return self._rows.batch_size

    @property
    @override
    def steps(self) -> int:
        """Return the wrapped source's number of steps."""
        return self._rows.steps

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        """Draw the batches with the wrapped source."""
        return self._rows.batches(sampling, steps, rng, skip)

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Return the gradients of the wrapped source."""
        return self._rows.per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Return the feature gradients of the wrapped source."""
        return self._rows.feature(weights, batch)
