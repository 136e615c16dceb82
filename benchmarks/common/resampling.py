"""Figures with their bootstrap replicates: over rows, paired between the rows of a table, averaged over seeds.

Every figure of a seed is recomputed on the same resamples of the test rows, of the members and of the non-members. So a
difference of two figures of one table is a difference of paired replicates. Figures and replicates are averaged over
seeds. From three seeds on a replicate also draws the seeds anew, so that the interval covers the training too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

REPLICATES = 400
_SEEDS_TO_DRAW = 3  # fewer seeds say nothing about their spread


@dataclass(frozen=True)
class Figure:
    """A figure of one seed.

    Attributes:
        value: on the rows themselves.
        replicates: (REPLICATES,), each on one resample of the rows.
        count: number of rows behind it; of members and non-members the smaller number.
    """

    value: float
    replicates: Numbers
    count: int

    def to_json(self) -> list[Any]:
        """For the way between processes: [value, replicates, count]."""
        return [self.value, self.replicates.tolist(), self.count]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> Figure:
        """The figure that `to_json` wrote."""
        value, replicates, count = found
        return cls(value, np.array(replicates), count)


def fixed(value: float, count: int = 1) -> Figure:
    """A figure that has no rows behind it, and so an interval without width."""
    return Figure(value, np.full(REPLICATES, value), count)


def counts(rows: int, *name: int) -> Numbers:
    """(REPLICATES, rows): how often each row is in each resample. The same `name` gives the same draws."""
    rng = np.random.default_rng([rows, *name])
    return rng.multinomial(rows, np.full(rows, 1 / rows), size=REPLICATES).astype(float)


def mean(values: Sequence[float], *name: int) -> Figure:
    """The mean over rows of one value a row; `name` is that of the draws (see `counts`)."""
    array = np.asarray(values, dtype=float)
    drawn = counts(len(array), *name)
    return Figure(float(array.mean()), drawn @ array / len(array), len(array))


def reduced(statistics: Numbers, reduce: Callable[[Numbers], float], *name: int) -> Figure:
    """A figure that `reduce` makes of the sum (k,) of each row's `statistics` (rows, k), as corpus BLEU is."""
    drawn = counts(len(statistics), *name) @ statistics
    value = reduce(statistics.sum(0))
    return Figure(value, np.array([reduce(row) for row in drawn]), len(statistics))


def auroc(members: Numbers, non_members: Numbers, member_name: tuple[int, ...], other_name: tuple[int, ...]) -> Figure:
    """The area under the ROC curve, ties halved; members and non-members are resampled independently."""
    wins = (members[:, None] > non_members[None]) + 0.5 * (members[:, None] == non_members[None])
    drawn = counts(len(members), *member_name) @ wins * counts(len(non_members), *other_name)
    replicates = drawn.sum(1) / wins.size
    return Figure(float(wins.mean()), replicates, min(wins.shape))


def average(figures: Sequence[Figure]) -> Figure:
    """The mean of several figures of one seed, replicate by replicate, as over clients."""
    return Figure(
        math.fsum(f.value for f in figures) / len(figures),
        np.mean([f.replicates for f in figures], axis=0),
        sum(f.count for f in figures),
    )


def over_seeds(figures: Sequence[Figure]) -> Figure:
    """One figure of the figures of several seeds."""
    together = np.stack([f.replicates for f in figures])
    if len(figures) >= _SEEDS_TO_DRAW:
        rng = np.random.default_rng(len(figures))
        drawn = rng.integers(len(figures), size=(REPLICATES, len(figures)))
        replicates = together[drawn, np.arange(REPLICATES)[:, None]].mean(1)
    else:
        replicates = together.mean(0)
    return Figure(math.fsum(f.value for f in figures) / len(figures), replicates, sum(f.count for f in figures))


def interval(figure: Figure) -> dict[str, float]:
    """Value and 95 % percentile interval, as a result file has them."""
    low, high = np.quantile(figure.replicates, (0.025, 0.975))
    return {"mean": figure.value, "low": float(low), "high": float(high), "n": figure.count}


def difference(mine: Figure, other: Figure) -> dict[str, float]:
    """The interval of `mine` less `other`, paired."""
    return interval(Figure(mine.value - other.value, mine.replicates - other.replicates, mine.count))


def shown(found: Mapping[str, float], form: str = ".3f") -> str:
    """An interval in a sentence: "0.512 [0.498, 0.527]"."""
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def told(found: Mapping[str, float], below: str = "lower", above: str = "higher") -> str:
    """Which side of 0 the interval of a difference lies on, in a word; "not told apart" where 0 is in it."""
    return below if found["high"] < 0 else above if found["low"] > 0 else "not told apart"


def ordering(figures: Mapping[str, Figure], order: Sequence[str], what: str) -> str:
    """A sentence on whether `figures` fall in the order that a paper has, from its first (highest) to its last.

    A pair holds, or is reversed, where the interval of its paired difference leaves 0 out. Else it cannot be told
    apart.
    """
    names = [name for name in order if name in figures]
    held: list[str] = []
    reversed_: list[str] = []
    open_: list[str] = []
    for i, high in enumerate(names):
        for low in names[i + 1 :]:
            d = difference(figures[high], figures[low])
            side = held if d["low"] > 0 else reversed_ if d["high"] < 0 else open_
            side.append(f"{high} over {low} ({d['mean']:+.3g} [{d['low']:.3g}, {d['high']:.3g}])")
    total = len(held) + len(reversed_) + len(open_)
    said = f"{what}: the paper's order {' > '.join(names)} "
    if len(held) == total:
        return said + f"holds in all {total} pairs."
    if not held and not reversed_:
        return said + f"can neither be confirmed nor refused: no pair of {total} differs beyond its 95 % interval."
    return said + (
        f"{'does not hold' if reversed_ else 'holds in part'}: {len(held)} of {total} pairs hold, {len(reversed_)} are "
        f"reversed{': ' + '; '.join(reversed_) if reversed_ else ''}, {len(open_)} cannot be told apart."
    )
