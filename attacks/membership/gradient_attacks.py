"""Per-example gradients, computed once for all attacks that derive statistics from them.

A per-example gradient is the expensive part of these attacks. Each attack reads only a few numbers from it,
such as a cosine with an upload or a residual on its span. So gradients are never stored. When an attack
requests an example at a start, all attacks read their numbers from that gradient at once, and the numbers
are stored. This includes other sites with the same start, because examples of no site are asked about each
of them.

| what is held | at most |
|---|---|
| gradients | those of a training batch, of at most `per_example_gradients.MOST_BYTES` |
| moves of sites | those of one turn that the attacks read: the site's own, and of OTHERS other sites |
| starts | of those, as many as differ |
| numbers | of `most` rows and readings, about 200 bytes each, and of the request under way; the oldest are forgotten |

The attack that asks first is charged the time of the shared work. In an audit that is the cheapest attack.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView, UploadAttack
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.per_example_gradients import row_gradients
from fedveil.attacks.model_extraction import residual_replay
from fedveil.attacks.statistics import Scores
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows

__all__ = ["COSINE", "GradientAttack", "GradientReading", "GradientStatistic", "SharedGradientScorer"]

MOST = 1 << 19  # rows times readings whose numbers are kept: about 100 MB
OTHERS = 12  # most other sites whose turns are read beside a site's own
Gradient = Mapping[str, Tensor]
Read = Callable[[Gradient], Sequence[float]]
_Key = tuple[int, bytes, bytes, str]  # task, start, move, gauge


@dataclass(frozen=True)
class GradientStatistic:
    """A statistic of an example's gradient at the start of a client round.

    Attributes:
        name: unique name of the statistic.
        width: count of numbers per example.
        of: maps a client update to the function of the gradient. It need not hold the update's start.
    """

    name: str
    width: int
    of: Callable[[ObservedClientUpdate], Read]


@dataclass(frozen=True)
class GradientReading:
    """A gauge at a turn."""

    gauge: GradientStatistic
    turn: ObservedClientUpdate


class GradientAttack(UploadAttack):
    """An attack that reads numbers off the gradients of single rows, and nothing else of them.

    The task must train by gradients of its own (`fedveil.training.gradient_backend.TrainableTask`).

    Attributes:
        gauge: what it reads off each.
    """

    gauge: ClassVar[GradientStatistic]

    @override
    def misfit(self, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
        return residual_replay.explain_misfit(view) if residual_replay.has_residual(knowledge.task.spec) else ""

    @abstractmethod
    def at(self, turns: ObservedClientUpdates, site: str) -> Sequence[int]:
        """Return the site's client updates to attack, as indices into `ObservedClientUpdates.rounds`."""

    def beside(self, turns: ObservedClientUpdates, site: str, index: int) -> Iterator[ObservedClientUpdate]:
        """The turns that it reads for one of them, that one first; none where it is of no use to it."""
        yield turns.at(site, index)

    @abstractmethod
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> Mapping[str, Scores]:
        """(rows,) scores by name.

        Args:
            values: for each turn that was of use, of each that it read, (rows, numbers).
            count: of the rows.
        """

    @override
    def scores(self, view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows) -> Mapping[str, Scores]:
        return SharedGradientScorer([self], others=0).scores(self, view, site, knowledge, rows)


@dataclass
class SharedGradientScorer:
    """Attacks that share the gradients of rows, and the numbers that were read so far.

    Attributes:
        attacks: all that may ask.
        others: other sites whose turns are read on the way.
        most: numbers of rows and readings that are kept.
        computed: how many gradients there were so far.
    """

    attacks: Sequence[GradientAttack]
    others: int = OTHERS
    most: int = MOST
    computed: int = 0
    _known: OrderedDict[_Key, dict[int, tuple[Any, Sequence[float]]]] = field(default_factory=OrderedDict)
    _turns: dict[tuple[int, int], tuple[AdversaryView, Weights, ObservedClientUpdates]] = field(default_factory=dict)
    _tasks: dict[int, Any] = field(default_factory=dict)  # an id is of one thing as long as that thing is held

    def scores(
        self, attack: GradientAttack, view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows
    ) -> Mapping[str, Scores]:
        """See `UploadAttack.scores`: the same scores as the attack gives alone."""
        turns = self._turns_of(view, knowledge.initial)
        values = []
        for index in attack.at(turns, site):
            wanted = (GradientReading(attack.gauge, turn) for turn in attack.beside(turns, site, index))
            also = self._also(turns, site, turns.rounds(site)[index])
            if turn_scores := self._measured(knowledge.task, wanted, also, rows):
                values.append(turn_scores)
        return attack.combined(values, len(rows))

    def _turns_of(self, view: AdversaryView, initial: Weights) -> ObservedClientUpdates:
        key = id(view), id(initial)
        if key not in self._turns:
            self._turns[key] = view, initial, ObservedClientUpdates(view, initial)
        return self._turns[key][-1]

    def _also(self, turns: ObservedClientUpdates, site: str, round_: int) -> Iterator[GradientReading]:
        """Yield all readings that the attacks will need in that round, for the site and others."""
        for of in [site, *[other for other in turns.sites if other != site][: self.others]]:
            for index, round_number in enumerate(turns.rounds(of)):
                asking = [attack for attack in self.attacks if round_number == round_ and index in attack.at(turns, of)]
                if asking:
                    turn = turns.at(of, index)
                    yield from (GradientReading(attack.gauge, turn) for attack in asking)

    def _measured(
        self, task: Any, wanted: Iterator[GradientReading], also: Iterator[GradientReading], rows: Rows
    ) -> list[Scores]:
        """Return the numbers of each wanted reading, shape (examples, numbers).

        Readings in `also` at the same starts are computed along the way.
        """
        self._tasks[id(task)] = task
        asked, starts = list[tuple[_Key, int]](), dict[bytes, Weights]()
        reads: dict[_Key, Read] = {}
        for reading in wanted:
            key = _key(task, reading)
            asked.append((key, reading.gauge.width))
            starts.setdefault(reading.turn.starts_at, reading.turn.start)
            reads[key] = reading.gauge.of(reading.turn)
        if any(id(row) not in self._known.get(key, {}) for key, _ in asked for row in rows):
            for reading in also:
                key = _key(task, reading)
                if reading.turn.starts_at in starts and key not in reads:
                    reads[key] = reading.gauge.of(reading.turn)
            for starts_at, start in starts.items():
                self._read(task, start, {key: read for key, read in reads.items() if key[1] == starts_at}, rows)
        scores = [
            np.array([self._known[key][id(row)][1] for row in rows], float).reshape(len(rows), width)
            for key, width in asked
        ]
        self._forget([key for key, _ in asked])
        return scores

    def _read(self, task: Any, start: Weights, reads: Mapping[_Key, Read], rows: Rows) -> None:
        """Reads what is not known yet at a start: one gradient of each row."""
        known = {key: self._known.setdefault(key, {}) for key in reads}
        task.put(start)
        unread = {id(row): row for row in rows if any(id(row) not in of for of in known.values())}
        wanted = list(unread.values())
        for place, gradient in row_gradients(task, wanted):
            row = wanted[place]
            self.computed += 1
            for key, of in known.items():
                if id(row) not in of:
                    of[id(row)] = row, tuple(reads[key](gradient))

    def _forget(self, asked: Sequence[_Key]) -> None:
        """Drops the numbers that were asked for longest ago, down to `most`."""
        for key in asked:
            if key in self._known:  # not where no row was asked about
                self._known.move_to_end(key)
        num_cached = sum(map(len, self._known.values()))
        while num_cached > self.most:
            num_cached -= len(self._known.popitem(last=False)[1])


def _key(task: object, reading: GradientReading) -> _Key:
    return id(task), reading.turn.starts_at, reading.turn.moves_by, reading.gauge.name


def _cosine_with(turn: ObservedClientUpdate) -> Read:
    """Return a function: the cosine of the negative example gradient with an update.

    It covers the tensors that both have, and is 0 if either is 0.
    """
    moved = turn.moved
    length = sum(float(d.double().square().sum()) for d in moved.values()) ** 0.5

    def read(gradient: Gradient) -> Sequence[float]:
        dot = square = 0.0
        for name, g in gradient.items():
            if name in moved:
                dot -= float((g * moved[name]).double().sum())
                square += float(g.double().square().sum())
        return (dot / (square**0.5 * length) if square and length else 0.0,)

    return read


COSINE = GradientStatistic("cosine", 1, _cosine_with)
