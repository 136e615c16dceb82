"""Wrap a trainer for a control in which the attack must fail: uploads contain only noise.

Do not use it for protection. Protected runs refuse every operation that the accountant does not cover
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
    """A trainer whose examples have zero gradients, so that uploads contain only noise."""

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _DarkRows(self._trainer.rows)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Raise NotImplementedError: this control supports only noisy steps."""
        raise NotImplementedError("this control is only for methods with noise")

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Raise NotImplementedError: this control trains only on noise."""
        raise NotImplementedError("the control is of a method with noise")


class _DarkRows(WrappedGradientSource):
    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Return zeros for each example."""
        none = len(batch.rows)
        zeros = {n: torch.zeros(none, *w.shape, device=w.device) for n, w in weights.items()}
        return PerExampleGradients(zeros, torch.zeros(none))

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Return the feature gradients of no examples."""
        return super().feature(weights, BatchIndices(()))
