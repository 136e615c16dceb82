"""A trainer and row gradients that pass every call on, for those that watch some calls; a trainer of rows alone."""

from __future__ import annotations

from typing_extensions import override

from fedveil.contract.budget import Sampling
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Frozen, Penalty, PerSample, RowGradients, Trained, Trainer
from fedveil.rng import Stream


class WrappedTrainer(Trainer):
    """Passes every call to `trainer`. Whoever watches looks at single rows overrides `rows` too."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    @override
    def num_examples(self) -> int:
        return self._trainer.num_examples

    @property
    @override
    def spec(self) -> Spec:
        return self._trainer.spec

    @property
    @override
    def rows(self) -> RowGradients:
        return self._trainer.rows

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        return self._trainer.train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> Trained:
        return self._trainer.gradient(weights)


class TrainerOfRows(Trainer):
    """Has row gradients and no other trainer, so that whoever holds it cannot train on the rows without them."""

    def __init__(self, spec: Spec, rows: RowGradients) -> None:
        self._spec, self._rows = spec, rows

    @property
    @override
    def num_examples(self) -> int:
        return self._rows.num_examples

    @property
    @override
    def spec(self) -> Spec:
        return self._spec

    @property
    @override
    def rows(self) -> RowGradients:
        return self._rows


class WrappedRows(RowGradients):
    """Passes every call to `rows`."""

    def __init__(self, rows: RowGradients) -> None:
        self._rows = rows

    @property
    @override
    def num_examples(self) -> int:
        return self._rows.num_examples

    @property
    @override
    def batch_size(self) -> int:
        return self._rows.batch_size

    @property
    @override
    def steps(self) -> int:
        return self._rows.steps

    @override
    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        return self._rows.batches(sampling, steps, rng, skip)

    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        return self._rows.per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        return self._rows.feature(weights, batch)
