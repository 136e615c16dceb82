"""The gradients of single rows: each is computed once, for all attacks that read numbers off it.

A row's gradient at the start of a turn is the dear part of these attacks; what each of them reads off it is a few
numbers (a cosine with what a site sent, a residual on its span). So a gradient is never kept: when an attack asks for a
row at a start, whatever any of the attacks will read there is read at once, for the other sites that started alike as
well (rows of no site are asked about each of them), and the numbers are kept.

| what is held | at most |
|---|---|
| gradients | those of a training batch, of at most `many_rows.MOST_BYTES` |
| moves of sites | those of one turn that the attacks read: the site's own, and of OTHERS other sites |
| starts | of those, as many as differ |
| numbers | of `most` rows and readings, about 200 bytes each, and of the request under way; the oldest are forgotten |

The attack that asks first takes the time of what it shares with the others. In an audit that is the cheapest.
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

from fedveil.attacks.base import Knowledge, UploadAttack, View
from fedveil.attacks.hidden_model import replay
from fedveil.attacks.membership.many_rows import row_gradients
from fedveil.attacks.membership.turns import Turn, Turns
from fedveil.attacks.statistics import Scores
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows

MOST = 1 << 19  # rows times readings whose numbers are kept: about 100 MB
OTHERS = 12  # most other sites whose turns are read beside a site's own
Gradient = Mapping[str, Tensor]
Read = Callable[[Gradient], Sequence[float]]
_Key = tuple[int, bytes, bytes, str]  # task, start, move, gauge


@dataclass(frozen=True)
class Gauge:
    """What is read off a row's gradient at the start of a turn.

    Attributes:
        name: no other gauge has it.
        width: how many numbers it gives for a row.
        of: of a turn, the function of the gradient. It need not hold the turn's start.
    """

    name: str
    width: int
    of: Callable[[Turn], Read]


@dataclass(frozen=True)
class Reading:
    """A gauge at a turn."""

    gauge: Gauge
    turn: Turn


class GradientAttack(UploadAttack):
    """An attack that reads numbers off the gradients of single rows, and nothing else of them.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`).

    Attributes:
        gauge: what it reads off each.
    """

    gauge: ClassVar[Gauge]

    @override
    def misfit(self, view: View, knowledge: Knowledge) -> str:
        return replay.misfit(view) if replay.is_beside(knowledge.task.spec) else ""

    @abstractmethod
    def at(self, turns: Turns, site: str) -> Sequence[int]:
        """Which turns of the site it asks about, by their places in `Turns.rounds`."""

    def beside(self, turns: Turns, site: str, index: int) -> Iterator[Turn]:
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
    def scores(self, view: View, site: str, knowledge: Knowledge, rows: Rows) -> Mapping[str, Scores]:
        return Shared([self], others=0).scores(self, view, site, knowledge, rows)


@dataclass
class Shared:
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
    _turns: dict[tuple[int, int], tuple[View, Weights, Turns]] = field(default_factory=dict)
    _tasks: dict[int, Any] = field(default_factory=dict)  # an id is of one thing as long as that thing is held

    def scores(
        self, attack: GradientAttack, view: View, site: str, knowledge: Knowledge, rows: Rows
    ) -> Mapping[str, Scores]:
        """See `UploadAttack.scores`: the same scores as the attack gives alone."""
        turns = self._turns_of(view, knowledge.initial)
        values = []
        for index in attack.at(turns, site):
            wanted = (Reading(attack.gauge, turn) for turn in attack.beside(turns, site, index))
            also = self._also(turns, site, turns.rounds(site)[index])
            if found := self._measured(knowledge.task, wanted, also, rows):
                values.append(found)
        return attack.combined(values, len(rows))

    def _turns_of(self, view: View, initial: Weights) -> Turns:
        key = id(view), id(initial)
        if key not in self._turns:
            self._turns[key] = view, initial, Turns(view, initial)
        return self._turns[key][-1]

    def _also(self, turns: Turns, site: str, round_: int) -> Iterator[Reading]:
        """What the attacks will read at turns of that round, of the site and of others."""
        for of in [site, *[other for other in turns.sites if other != site][: self.others]]:
            for index, found in enumerate(turns.rounds(of)):
                asking = [attack for attack in self.attacks if found == round_ and index in attack.at(turns, of)]
                if asking:
                    turn = turns.at(of, index)
                    yield from (Reading(attack.gauge, turn) for attack in asking)

    def _measured(self, task: Any, wanted: Iterator[Reading], also: Iterator[Reading], rows: Rows) -> list[Scores]:
        """Of each wanted reading, (rows, numbers); those of `also` at the same starts are read on the way."""
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
        found = [
            np.array([self._known[key][id(row)][1] for row in rows], float).reshape(len(rows), width)
            for key, width in asked
        ]
        self._forget([key for key, _ in asked])
        return found

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
        held = sum(map(len, self._known.values()))
        while held > self.most:
            held -= len(self._known.popitem(last=False)[1])


def _key(task: object, reading: Reading) -> _Key:
    return id(task), reading.turn.starts_at, reading.turn.moves_by, reading.gauge.name


def _cosine_with(turn: Turn) -> Read:
    """Of minus a row's gradient with a move, over the tensors that have both; 0 where one of them is 0."""
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


COSINE = Gauge("cosine", 1, _cosine_with)
