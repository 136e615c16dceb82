"""A trainer that trains nothing, so that benchmarks measure only the federation."""

from __future__ import annotations

from typing import Any

from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import PerExampleGradientSource, TrainingResult


class NoOpTrainer:
    """Shifts every weight by `shift`; 0 returns the received tensors. Reports 100 examples and `shift`."""

    batch_size = steps = 1

    def __init__(self, spec: Spec, shift: float = 0.0) -> None:
        self.spec, self.num_examples, self._shift = spec, 100 + int(shift), shift

    def train(self, weights: Weights, frozen: Any = None, penalty: Any = None) -> TrainingResult:
        """Return the shifted weights."""
        return TrainingResult({name: w + self._shift if self._shift else w for name, w in weights.items()}, {})

    def gradient(self, weights: Weights) -> TrainingResult:
        """Return weights in place of a gradient; they cost as much to send."""
        return TrainingResult({name: w - self._shift if self._shift else w for name, w in weights.items()}, {})

    @property
    def rows(self) -> PerExampleGradientSource:
        """Raise NotImplementedError: this trainer draws no examples."""
        raise NotImplementedError("nothing is drawn here")
