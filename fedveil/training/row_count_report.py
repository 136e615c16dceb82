"""A trainer that reports how many of the site's rows were truncated or dropped; see `fedveil.contract.row_counts`.

Per-example gradient steps do not report these counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from typing_extensions import override

from fedveil.contract.param_spec import Weights
from fedveil.contract.row_counts import RowCounts
from fedveil.contract.trainer import Frozen, Penalty, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper


@final
class RowCountTrainer(TrainerWrapper):
    """A trainer that adds the site's counts to each report."""

    def __init__(self, trainer: Trainer, counts: RowCounts) -> None:
        super().__init__(trainer)
        self._counts = counts

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        return self._reported(super().train(weights, frozen, penalty))

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        return self._reported(super().gradient(weights))

    def _reported(self, trained: TrainingResult) -> TrainingResult:
        return replace(trained, report={**trained.report, **self._counts.to_report()})
