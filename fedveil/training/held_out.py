"""A trainer that scores the first weights of a turn on held-out rows, and says so in its reports.

The first weights are what the method is about to train from: what the server sent, with the factor, layers or prompt
that a site keeps for itself in their places. A method that trains twice in a turn reports the same figure twice.

| a turn ... | its report |
|---|---|
| whose site may answer | loss_held_out, rows_held_out |
| whose site may not, or cannot | held_out_refused |
| that makes steps of single rows | nothing: such steps are of a claim, which refuses held-out scores altogether |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from typing_extensions import override

from fedveil.contract import held_out
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows
from fedveil.contract.trainer import Frozen, Penalty, ScoresRows, Trained, Trainer
from fedveil.privacy.wrapped import WrappedTrainer


@final
class Scored(WrappedTrainer):
    """A trainer that scores.

    Args:
        trainer: trains on other rows than `held`.
        held: the rows that are held out.
        refusal: asked once, before anything is computed; a key of `held_out.REFUSALS`, or 0: the site answers.
    """

    def __init__(self, trainer: Trainer, held: Rows, refusal: Callable[[], int]) -> None:
        super().__init__(trainer)
        self._held, self._refusal = held, refusal
        self._said: Mapping[str, float] = {}

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        self._score(weights)
        return self._reported(super().train(weights, frozen, penalty))

    @override
    def gradient(self, weights: Weights) -> Trained:
        self._score(weights)
        return self._reported(super().gradient(weights))

    def _reported(self, trained: Trained) -> Trained:
        return replace(trained, report={**trained.report, **self._said})

    def _score(self, weights: Weights) -> None:
        if self._said:
            return
        refused, loss = self._refusal(), math.nan
        if not refused and not isinstance(self._trainer, ScoresRows):
            refused = held_out.NO_SCORE
        if not refused and isinstance(self._trainer, ScoresRows):
            loss = self._trainer.mean_loss(weights, self._held)
            refused = 0 if math.isfinite(loss) else held_out.NOT_FINITE
        answer = {held_out.LOSS: loss, held_out.ROWS: float(len(self._held))}
        self._said = {held_out.REFUSED: float(refused)} if refused else answer
