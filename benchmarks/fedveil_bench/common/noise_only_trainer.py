"""A trainer in front of another one, for a control that must lose: what is sent is noise alone.

Not for what protects people: there every operation is refused unless it is accounted for
(`fedveil.privacy.charged_gradients`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from fedveil.contract.param_spec import Weights
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import TrainerWrapper, WrappedGradientSource


class NoiseOnlyTrainer(TrainerWrapper):
    """Rows have gradients of zero: what is sent is noise alone."""

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _DarkRows(self._trainer.rows)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Refused: there is nothing but noise to see."""
        raise NotImplementedError("the control is of a method with noise")


class _DarkRows(WrappedGradientSource):
    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Zeros, a row each."""
        none = len(batch.rows)
        zeros = {n: torch.zeros(none, *w.shape, device=w.device) for n, w in weights.items()}
        return PerExampleGradients(zeros, torch.zeros(none))

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Return the feature gradients of no rows."""
        return super().feature(weights, BatchIndices(()))
