"""A trainer that scores a client round's initial weights on held-out examples and reports the score.

The initial weights are the method's starting point: the server's weights with the site's private factor, layers or
prompt. A method that trains twice in a client round reports the same score twice.

| client round | report |
|---|---|
| the site may report a score | loss_held_out, rows_held_out |
| the site may not or cannot report a score | held_out_refused |
| the round takes per-example gradient steps | nothing: such steps imply a privacy guarantee, which forbids these
  scores |

`ReceivedLossFilter` keeps `loss_received`, which a trainer measures on the site's training examples, at the site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, final, overload

from typing_extensions import override

from fedveil.contract import held_out_report
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows
from fedveil.contract.trainer import Frozen, Penalty, ScoresExamples, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper

RECEIVED_LOSS = "loss_received"


@final
class HeldOutScoringTrainer(TrainerWrapper):
    """A trainer that scores held-out examples.

    Args:
        trainer: the wrapped trainer, which trains on examples other than `held`.
        held: the held-out examples.
        refusal: called once, before any computation; returns a key of `held_out_report.REFUSALS`, or 0 for no refusal.
    """

    def __init__(self, trainer: Trainer, held: Rows, refusal: Callable[[], int]) -> None:
        super().__init__(trainer)
        self._held, self._refusal = held, refusal
        self._said: Mapping[str, float] = {}

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self._score(weights)
        return self._reported(super().train(weights, frozen, penalty))

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        self._score(weights)
        return self._reported(super().gradient(weights))

    def _reported(self, trained: TrainingResult) -> TrainingResult:
        return replace(trained, report={**trained.report, **self._said})

    def _score(self, weights: Weights) -> None:
        if self._said:
            return
        refused, loss = self._refusal(), math.nan
        if not refused and not isinstance(self._trainer, ScoresExamples):
            refused = held_out_report.NO_SCORE
        if not refused and isinstance(self._trainer, ScoresExamples):
            loss = self._trainer.mean_loss(weights, self._held)
            refused = 0 if math.isfinite(loss) else held_out_report.NOT_FINITE
        answer = {held_out_report.LOSS: loss, held_out_report.ROWS: float(len(self._held))}
        self._said = {held_out_report.REFUSED: float(refused)} if refused else answer


@dataclass(frozen=True)
class HeldOutSplit:
    """A site's examples split into two parts, without copying.

    Attributes:
        trained: the examples for training.
        held: the examples for scoring; empty if none are held out.
    """

    trained: Rows
    held: Rows


def split_held_out(rows: Rows, indices: Set[int], unscored: Set[int] = frozenset()) -> HeldOutSplit:
    """Split the examples into training examples and held-out examples at `indices`, without the `unscored` ones."""
    if not indices:
        return HeldOutSplit(rows, ())
    trained = [index for index in range(len(rows)) if index not in indices]
    return HeldOutSplit(ExampleSubset(rows, trained), ExampleSubset(rows, sorted(indices - unscored)))


@final
class ReceivedLossFilter(TrainerWrapper):
    """A trainer that does not report the received weights' loss on the site's training examples.

    Args:
        trainer: the wrapped trainer, which reports the held-out loss if there are held-out examples.
        tells: whether to report the held-out loss as `loss_received`, which is never reported without a held-out loss.
    """

    def __init__(self, trainer: Trainer, tells: bool) -> None:
        super().__init__(trainer)
        self._tells = tells

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        return self._filtered(super().train(weights, frozen, penalty))

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        return self._filtered(super().gradient(weights))

    def _filtered(self, trained: TrainingResult) -> TrainingResult:
        report = {name: value for name, value in trained.report.items() if name != RECEIVED_LOSS}
        # Without steps, loss_trained is the loss at the received weights under a different name.
        if not report.get("steps"):
            report.pop("loss_trained", None)
        if self._tells and held_out_report.LOSS in report:
            report[RECEIVED_LOSS] = report[held_out_report.LOSS]
        return replace(trained, report=report)


@final
class ExampleSubset(Sequence[Any]):
    """A view of some of the examples, in the order of their indices."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows, self._indices = rows, indices

    @override
    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._rows[i] for i in self._indices[index]]
        return self._rows[self._indices[index]]
