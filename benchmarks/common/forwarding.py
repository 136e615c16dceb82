"""A trainer in front of another one, for benchmarks that watch or change a part of a client's work.

Not for what protects people: there every operation is refused unless it is accounted for (`fedveil.privacy.metered`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from fedveil.contract.budget import Sampling
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Penalty, PerSample, RowGradients, Trained, Trainer
from fedveil.rng import Stream


class Forwarding(Trainer):
    """Asks `inner` everything."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner

    @property
    @override
    def num_examples(self) -> int:
        return self.inner.num_examples

    @property
    @override
    def spec(self) -> Spec:
        return self.inner.spec

    @property
    @override
    def rows(self) -> RowGradients:
        return self.inner.rows

    @override
    def train(self, weights: Weights, frozen: Weights | None = None, penalty: Penalty | None = None) -> Trained:
        return self.inner.train(weights, frozen, penalty)

    @override
    def gradient(self, weights: Weights) -> Trained:
        return self.inner.gradient(weights)


class Dark(Forwarding):
    """Rows have gradients of zero: what is sent is noise alone."""

    @property
    @override
    def rows(self) -> RowGradients:
        return _DarkRows(self.inner.rows)

    @override
    def train(self, weights: Weights, frozen: Weights | None = None, penalty: Penalty | None = None) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")

    @override
    def gradient(self, weights: Weights) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")


class _DarkRows(RowGradients):
    def __init__(self, inner: RowGradients) -> None:
        self._inner = inner

    @property
    @override
    def num_examples(self) -> int:
        return self._inner.num_examples

    @property
    @override
    def batch_size(self) -> int:
        return self._inner.batch_size

    @property
    @override
    def steps(self) -> int:
        return self._inner.steps

    @override
    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        return self._inner.batches(sampling, steps, rng, skip)

    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        """Zeros, a row each."""
        none = len(batch.rows)
        zeros = {n: torch.zeros(none, *w.shape, device=w.device) for n, w in weights.items()}
        return PerSample(zeros, torch.zeros(none))

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """Of no rows."""
        return self._inner.feature(weights, Batch(()))
