"""Count the examples behind an upload as reported by the trainers, not as claimed by the upload.

| source | counted |
|---|---|
| plain training or a gradient | the examples of its steps, as reported by the trainer (`TrainingResult.looked`) |
| batches drawn by a method or a privacy mechanism | the examples in the batches |
| Poisson batches | the expected number, and batch-size as the smallest step: the drawn examples must stay secret,
  and a refusal would reveal something about them |
| the report's `loss_received` | not counted: no step used these examples |
| a trainer that does not report its examples | none |
"""

from __future__ import annotations

from typing import final

from typing_extensions import override

from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Sampling
from fedveil.contract.trainer import (
    BatchIndices,
    ExamplesUsed,
    Frozen,
    Penalty,
    PerExampleGradientSource,
    Trainer,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import TrainerWrapper, WrappedGradientSource
from fedveil.rng import RandomStream


@final
class ExampleCounter(TrainerWrapper):
    """A trainer that counts the examples behind everything it returns."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._rows: set[int] = set()
        self._least: list[int] = []
        self._missed = 1.0  # probability that an example is not in any Poisson batch

    @property
    def distinct(self) -> int:
        """Return the number of distinct examples so far."""
        return max(len(self._rows), int(self.num_examples * (1 - self._missed) + 1e-9))

    @property
    def least(self) -> int:
        """Return the number of examples in the smallest step so far; 0 before the first step."""
        return min(self._least, default=0)

    def saw(self, looked: ExamplesUsed) -> None:
        """Count the examples of one training call."""
        self._rows |= looked.rows
        self._least += [looked.min_batch] if looked.rows else []

    def saw_poisson(self, batch_size: int, steps: int) -> None:
        """Count Poisson batches."""
        self._missed *= (1 - batch_size / self.num_examples) ** steps
        self._least += [batch_size] if steps else []

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _WitnessedRows(self._trainer.rows, self)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        trained = super().train(weights, frozen, penalty)
        self.saw(trained.looked)
        return trained

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        result = super().gradient(weights)
        self.saw(result.looked)
        return result


@final
class _WitnessedRows(WrappedGradientSource):
    """Per-example gradients that report the drawn batches to the counter."""

    def __init__(self, rows: PerExampleGradientSource, witness: ExampleCounter) -> None:
        super().__init__(rows)
        self._witness = witness

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        drawn = super().batches(sampling, steps, rng, skip)
        if sampling == "poisson":
            self._witness.saw_poisson(self.batch_size, len(drawn))
        else:
            self._witness.saw(ExamplesUsed.from_steps(batch.rows for batch in drawn))
        return drawn
