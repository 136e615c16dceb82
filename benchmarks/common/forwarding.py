"""A Local in front of another one, for benchmarks that watch or change a part of a client's work.

Not for what protects people: there every operation is refused unless it is accounted for (`fedveil.privacy.metered`).
"""

from __future__ import annotations

import torch

from fedveil.contract.budget import Sampling
from fedveil.contract.spec import Weights
from fedveil.contract.trainer import Around, Batch, FeatureGradients, Local, PerSample, Trained
from fedveil.rng import Stream


class Forwarding(Around):
    """Asks `inner` everything. See Local."""

    def __init__(self, inner: Local) -> None:
        super().__init__(inner)
        self.inner = inner

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        """See Local."""
        return self.inner.train(weights, frozen)

    def gradient(self, weights: Weights) -> Trained:
        """See Local."""
        return self.inner.gradient(weights)

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        """See Local."""
        return self.inner.batches(sampling, steps, rng, skip)

    def per_sample_gradients(self, weights: Weights, batch: Batch) -> PerSample:
        """See Local."""
        return self.inner.per_sample_gradients(weights, batch)

    def feature_gradients(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """See Local."""
        return self.inner.feature_gradients(weights, batch)


class Dark(Forwarding):
    """Rows have gradients of zero: what is sent is noise alone."""

    def per_sample_gradients(self, weights: Weights, batch: Batch) -> PerSample:
        """Zeros, a row each."""
        none = len(batch.rows)
        return PerSample(
            {n: torch.zeros(none, *w.shape, device=w.device) for n, w in weights.items()}, torch.zeros(none)
        )

    def feature_gradients(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """Of no rows."""
        return self.inner.feature_gradients(weights, Batch(()))

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")

    def gradient(self, weights: Weights) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")
