"""A trainer that scores the first weights of a turn on held-out rows, and says so in its reports.

The first weights are what the method is about to train from: what the server sent, with the factor, layers or prompt
that a site keeps for itself in their places. A method that trains twice in a turn reports the same figure twice.

| a turn ... | its report |
|---|---|
| whose site may answer | loss_held_out, rows_held_out |
| whose site may not, or cannot | held_out_refused |
| that makes steps of single rows | nothing: such steps are of a claim, which refuses held-out scores altogether |

It also chooses which of a site's rows are held out.

A row is held out where BLAKE2b of its file and number, under a key of the site's for the run, lies below the part that
is asked. So rows that are appended move no other one, each run holds out other rows, and the server can choose none.

| case | result |
|---|---|
| fewer than LEAST_ROWS rows would be held out, or none would be left | none is; all are trained on |
| a row of no file | its place in the data set stands for its number |
| a file that loses or changes rows while a run lasts | its later rows have other numbers: some change sides |
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final, overload

from typing_extensions import override

from fedveil.contract import held_out_report
from fedveil.contract.held_out_report import LEAST_ROWS
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import ExampleOrigin, Rows
from fedveil.contract.trainer import Frozen, Penalty, ScoresExamples, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper


@final
class HeldOutScoringTrainer(TrainerWrapper):
    """A trainer that scores.

    Args:
        trainer: trains on other rows than `held`.
        held: the rows that are held out.
        refusal: asked once, before anything is computed; a key of `held_out_report.REFUSALS`, or 0: the site answers.
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
    """A site's rows in two parts, neither of them a copy.

    Attributes:
        trained: what it trains on.
        held: what it scores on; empty where nothing is held out.
    """

    trained: Rows
    held: Rows


def split_held_out(rows: Rows, origins: Iterable[ExampleOrigin | None], key: bytes, part: float) -> HeldOutSplit:
    """Split the examples, with about `part` (0 to 1) held out.

    `origins` has one entry per example, in order; `key` has 32 bytes.

    Raises:
        ValueError: there are not as many origins as examples.
    """
    below = round(part * 2**64)
    sides: tuple[list[int], list[int]] = ([], [])
    for (index, origin), _ in zip(enumerate(origins), range(len(rows)), strict=True):
        name = f"{origin.row} {origin.file}" if origin else f"none {index}"
        drawn = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
        sides[int.from_bytes(drawn, "little") < below].append(index)
    trained, held_out = sides
    if len(held_out) < LEAST_ROWS or not trained:
        return HeldOutSplit(rows, ())
    return HeldOutSplit(ExampleSubset(rows, trained), ExampleSubset(rows, held_out))


@final
class ExampleSubset(Sequence[Any]):
    """Some of the rows, in the order of their indices, read where they lie."""

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
