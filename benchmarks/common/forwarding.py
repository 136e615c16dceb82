"""A trainer in front of another one, for a control that must lose: what is sent is noise alone.

Not for what protects people: there every operation is refused unless it is accounted for (`fedveil.privacy.metered`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from fedveil.contract.spec import Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Frozen, Penalty, PerSample, RowGradients, Trained
from fedveil.privacy.wrapped import WrappedRows, WrappedTrainer


class Dark(WrappedTrainer):
    """Rows have gradients of zero: what is sent is noise alone."""

    @property
    @override
    def rows(self) -> RowGradients:
        return _DarkRows(self._trainer.rows)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")

    @override
    def gradient(self, weights: Weights) -> Trained:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")


class _DarkRows(WrappedRows):
    @override
    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        """Zeros, a row each."""
        none = len(batch.rows)
        zeros = {n: torch.zeros(none, *w.shape, device=w.device) for n, w in weights.items()}
        return PerSample(zeros, torch.zeros(none))

    @override
    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """Of no rows."""
        return super().feature(weights, Batch(()))
