"""A trainer that trains nothing, so that what is measured is the federation."""

from __future__ import annotations

from typing import Any

from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import PerExampleGradientSource, TrainingResult


class NoOpTrainer:
    """Moves every weight by `shift`; with 0 it gives back the tensors that it got. Claims 100 examples and `shift`."""

    batch_size = steps = 1

    def __init__(self, spec: Spec, shift: float = 0.0) -> None:
        self.spec, self.num_examples, self._shift = spec, 100 + int(shift), shift

    def train(self, weights: Weights, frozen: Any = None, penalty: Any = None) -> TrainingResult:
        """The weights, moved."""
        return TrainingResult({name: w + self._shift if self._shift else w for name, w in weights.items()}, {})

    def gradient(self, weights: Weights) -> TrainingResult:
        """Not a gradient: other weights, which cost as much to send."""
        return TrainingResult({name: w - self._shift if self._shift else w for name, w in weights.items()}, {})

    @property
    def rows(self) -> PerExampleGradientSource:
        """Refused: nothing is drawn here."""
        raise NotImplementedError("nothing is drawn here")
