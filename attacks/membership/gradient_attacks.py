"""Per-example gradients, computed once for all attacks that derive statistics from them.

A per-example gradient is the expensive part of these attacks. Each attack reads only a few numbers from it,
such as a cosine with an upload or a residual on its span. So gradients are never stored. When an attack
requests an example's gradient at a start, all attacks read their numbers from it at once, and the numbers
are stored. This includes numbers for other sites with the same start, because non-members are scored against
every site.

| in memory | at most |
|---|---|
| gradients | those of a training batch, at most `per_example_gradients.MOST_BYTES` |
| updates of sites | those read for one client round: the site's own, and at most OTHERS from other sites |
| starts | the distinct starts of those updates |
| numbers | `most` (example, reading) pairs, about 200 bytes each, plus the current request; the oldest are dropped |

The attack that asks first is charged for the time of the shared work. In an audit, that is the cheapest attack.
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

MOST = 1 << 19  # maximum number of stored (example, reading) pairs: about 100 MB
OTHERS = 12  # maximum number of other sites whose updates are also scored with a site's own
Gradient = Mapping[str, Tensor]
Read = Callable[[Gradient], Sequence[float]]
_Key = tuple[int, bytes, bytes, str]  # task, start, move, gauge


@dataclass(frozen=True)
class GradientStatistic:
    """A statistic of an example's gradient at the start of a client round.

    Attributes:
        name: unique name of the statistic.
        width: number of values per example.
        of: maps a client update to a function of the gradient; this function need not keep the update's start.
    """

    name: str
    width: int
    of: Callable[[ObservedClientUpdate], Read]


@dataclass(frozen=True)
class GradientReading:
    """A statistic at one client update."""

    gauge: GradientStatistic
    turn: ObservedClientUpdate


class GradientAttack(UploadAttack):
    """An attack that computes only a few numbers from each per-example gradient.

    The task must compute its own gradients (`fedveil.training.gradient_backend.TrainableTask`).

    Attributes:
        gauge: the statistic that the attack computes.
    """

    gauge: ClassVar[GradientStatistic]

    @override
    def misfit(self, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
        return residual_replay.explain_misfit(view) if residual_replay.has_residual(knowledge.task.spec) else ""

    @abstractmethod
    def at(self, turns: ObservedClientUpdates, site: str) -> Sequence[int]:
        """Return the site's client updates to attack, as indices into `ObservedClientUpdates.rounds`."""

    def beside(self, turns: ObservedClientUpdates, site: str, index: int) -> Iterator[ObservedClientUpdate]:
        """Yield the updates needed for the one at `index`, beginning with that one; nothing if it is unusable."""
        yield turns.at(site, index)

    @abstractmethod
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> Mapping[str, Scores]:
        """Return scores by name, each of shape (rows,).

        Args:
            values: for each usable client update, one array per update read for it, of shape (rows, numbers).
            count: number of rows.
        """

    @override
    def scores(self, view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows) -> Mapping[str, Scores]:
        return SharedGradientScorer([self], others=0).scores(self, view, site, knowledge, rows)


@dataclass
class SharedGradientScorer:
    """Attacks that share per-example gradients, and the numbers computed so far.

    Attributes:
        attacks: all attacks that may request scores.
        others: maximum number of other sites whose updates are also scored.
        most: maximum number of stored (example, reading) pairs.
        computed: number of gradients computed so far.
    """

    attacks: Sequence[GradientAttack]
    others: int = OTHERS
    most: int = MOST
    computed: int = 0
    _known: OrderedDict[_Key, dict[int, tuple[Any, Sequence[float]]]] = field(default_factory=OrderedDict)
    _turns: dict[tuple[int, int], tuple[AdversaryView, Weights, ObservedClientUpdates]] = field(default_factory=dict)
    _tasks: dict[int, Any] = field(default_factory=dict)  # keeps each task alive, so that its id stays unique

    def scores(
        self, attack: GradientAttack, view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows
    ) -> Mapping[str, Scores]:
        """Return the same scores as `UploadAttack.scores` would without sharing."""
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
        """Yield all readings that the attacks will need in that round, for this and other sites."""
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
        """Compute the missing numbers at a start, with one gradient per example."""
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
        """Drop the least recently requested numbers until `most` remain."""
        for key in asked:
            if key in self._known:  # absent if there were no rows
                self._known.move_to_end(key)
        num_cached = sum(map(len, self._known.values()))
        while num_cached > self.most:
            num_cached -= len(self._known.popitem(last=False)[1])


def _key(task: object, reading: GradientReading) -> _Key:
    return id(task), reading.turn.starts_at, reading.turn.moves_by, reading.gauge.name


def _cosine_with(turn: ObservedClientUpdate) -> Read:
    """Return a function that computes the cosine between the negative example gradient and an update.

    The cosine covers the tensors that both have, and is 0 if either is 0.
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
