"""A figure in a result file, and the difference of two figures, as far as the file allows them to be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.check import bootstrap, reference

TOLERANCE = 1e-6  # relative to the figure, for values that are stored unrounded
_PAIRED = 1.3  # the rows' part of a difference is at most the sum of both rows' parts; percentiles scatter around that


@dataclass(frozen=True)
class Figure:
    """A row's metric: its mean, its 95 % interval, and each seed's value, if the file has them.

    Attributes:
        of_seeds: whether the interval covers only the seeds.
        replicates: the value on resamples of the test rows, if the file has the data for it.
    """

    mean: float
    low: float
    high: float
    n: int
    seeds: tuple[float, ...]
    of_seeds: bool = False
    replicates: bootstrap.Numbers | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_json(
        cls, found: Mapping[str, Any], of_seeds: bool = False, replicates: bootstrap.Numbers | None = None
    ) -> Figure:
        """Return the figure from a file's metric."""
        seeds = tuple(found.get("seeds", ()))
        return cls(found["mean"], found["low"], found["high"], found["n"], seeds, of_seeds, replicates)

    @property
    def slack(self) -> float:
        """Return the distance up to which two numbers for this figure count as equal."""
        return TOLERANCE * max(1.0, abs(self.mean))

    @property
    def seeds_half(self) -> float:
        """Return the half-width of the interval over the seeds alone."""
        return reference.compute_half_width(self.seeds)

    def has_seeds_interval(self) -> bool:
        """Return whether the interval is the one over the seeds alone."""
        half = self.seeds_half
        return max(abs(self.mean - half - self.low), abs(self.mean + half - self.high)) <= self.slack

    def has_share_interval(self) -> bool:
        """Return whether the interval is the exact one for a share of trials, with one trial per seed."""
        if not set(self.seeds) <= {0.0, 1.0}:
            return False
        low, high = reference.compute_share_interval(round(sum(self.seeds)), len(self.seeds))
        return max(abs(low - self.low), abs(high - self.high)) <= self.slack

    def covers_seeds(self) -> bool:
        """Return whether the interval is at least as wide as the one over the seeds alone, on each side."""
        half = self.seeds_half
        return self.low <= self.mean - half + self.slack and self.high >= self.mean + half - self.slack

    def rows_halves(self) -> tuple[float, float]:
        """Return the rows' part of the half-widths below and above the mean, from the interval and the seeds."""
        seeds_half = self.seeds_half if len(self.seeds) > 1 else 0.0
        sides = (self.mean - self.low, self.high - self.mean)
        below, above = (math.sqrt(max(0.0, side**2 - seeds_half**2)) for side in sides)
        return below, above


@dataclass(frozen=True)
class Difference:
    """A figure minus another figure or a constant, paired by seed.

    Attributes:
        value: the difference.
        seeds: each seed's difference; empty for a figure that is judged over its rows alone.
        below, above: lower and upper bound of the rows' part of each half-width; they are equal if it is known.
    """

    value: float
    seeds: tuple[float, ...]
    below: tuple[float, float]
    above: tuple[float, float]

    @property
    def seeds_half(self) -> float:
        """Return the half-width of the interval over the seeds alone; 0 without seeds."""
        return reference.compute_half_width(self.seeds) if len(self.seeds) > 1 else 0.0

    def is_known(self) -> bool:
        """Return whether the rows' part is known exactly."""
        return all(most - least <= TOLERANCE * max(1.0, abs(self.value)) for least, most in (self.below, self.above))

    def interval(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the lower and upper bounds of the interval's low end, and of its high end."""
        half = self.seeds_half
        low, high = (tuple(math.hypot(half, rows) for rows in side) for side in (self.below, self.above))
        return (self.value - low[1], self.value - low[0]), (self.value + high[0], self.value + high[1])

    def narrow(self, low: float, high: float, rounding: float) -> Difference:
        """Return the difference with the rows' part taken from a printed interval, up to its rounding."""

        def of_side(half: float) -> tuple[float, float]:
            least, most = (
                math.sqrt(max(0.0, max(0.0, at) ** 2 - self.seeds_half**2)) for at in (half - rounding, half + rounding)
            )
            return least, most

        return Difference(self.value, self.seeds, of_side(self.value - low), of_side(high - self.value))

    def p_values(self, at: float = 0.0) -> tuple[float, float]:
        """Return the lower and upper bound of the p-value for the difference not being `at`."""
        rows = self.below if self.value > at else self.above
        least, most = (reference.compute_p_value(abs(self.value - at), half, self.seeds) for half in rows)
        return least, most


def subtract(mine: Figure, other: Figure | float) -> Difference:
    """Return `mine` minus `other`.

    The rows' part is known for a constant, and if the file has only seeds. It is nearly known if both figures have
    replicates; otherwise it is only bounded.
    """
    if not isinstance(other, Figure):
        below, above = mine.rows_halves()
        seeds = tuple(value - other for value in mine.seeds)
        return Difference(mine.mean - other, seeds, (below, below), (above, above))
    value, seeds = mine.mean - other.mean, pair_seeds(mine, other)
    if mine.of_seeds and other.of_seeds:
        return Difference(value, seeds, (0.0, 0.0), (0.0, 0.0))
    if mine.replicates is not None and other.replicates is not None:
        halves = bootstrap.compute_halves(mine.replicates - other.replicates)
        below, above = (((1 - bootstrap.NEAR) * half, (1 + bootstrap.NEAR) * half) for half in halves)
        return Difference(value, seeds, below, above)
    sums = [sum(halves) for halves in zip(mine.rows_halves(), reversed(other.rows_halves()), strict=True)]
    return Difference(value, seeds, (0.0, _PAIRED * sums[0]), (0.0, _PAIRED * sums[1]))


def pair_seeds(mine: Figure, other: Figure) -> tuple[float, ...]:
    """Return each seed's difference. A figure without seeds has the same value for every seed."""
    count = max(len(mine.seeds), len(other.seeds))
    sides: list[Sequence[float]] = [f.seeds or (f.mean,) * count for f in (mine, other)]
    return tuple(a - b for a, b in zip(*sides, strict=True))
