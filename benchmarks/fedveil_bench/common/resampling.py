"""Figures with their bootstrap replicates: over rows, paired between the rows of a table, averaged over seeds.

Every figure of a seed is recomputed on the same resamples of the test rows, of the members and of the non-members. So a
difference of two figures of one table is a difference of paired replicates. Seeds share the names of their draws, so
that rows which several seeds score count once.

An interval covers the rows, by the replicates, and the training, by Student's t over the seeds' own values, however few
they are. The two are put together as limits of a sum of independent parts (Zou and Donner 2008):

    value -+ sqrt(half_rows^2 + (t_{seeds - 1} s / sqrt(seeds))^2)

With rows drawn anew for each seed, s has their noise in it already, and the interval is too wide, by a factor of at
most 1.3 from three seeds on. One seed says nothing of the training: its interval is of the rows alone.

Two seeds have an interval, and decide nothing: where a figure has few values (accuracy on 60 rows) they often agree by
chance, and then show no spread at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks.statistics import student_t

Numbers = NDArray[np.float64]

REPLICATES = 400
SEEDS_TO_DECIDE = 3
_STEPS = 30  # halvings of a probability's exponent: 8 digits of it
_LEAST_P = 1e-12


@dataclass(frozen=True)
class ResampledMetric:
    """A figure of one seed, or of several.

    Attributes:
        value: on the rows themselves; of several seeds the mean.
        replicates: (REPLICATES,), each on one resample of the rows.
        count: number of rows behind it; of members and non-members the smaller number.
        seeds: the value of each seed; none where the figure is not of seeds (`over_seeds` makes one that is).
    """

    value: float
    replicates: Numbers
    count: int
    seeds: tuple[float, ...] = ()

    def to_json(self) -> list[Any]:
        """For the way between processes: [value, replicates, count]."""
        return [self.value, self.replicates.tolist(), self.count]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> ResampledMetric:
        """The figure that `to_json` wrote."""
        value, replicates, count = found
        return cls(value, np.array(replicates), count)


def from_constant(value: float, count: int = 1) -> ResampledMetric:
    """A figure that has no rows behind it, and so an interval without width."""
    return ResampledMetric(value, np.full(REPLICATES, value), count)


def draw_counts(rows: int, *name: int) -> Numbers:
    """(REPLICATES, rows): how often each row is in each resample. The same `name` gives the same draws."""
    rng = np.random.default_rng([rows, *name])
    return rng.multinomial(rows, np.full(rows, 1 / rows), size=REPLICATES).astype(float)


def resample_mean(values: Sequence[float], *name: int) -> ResampledMetric:
    """The mean over rows of one value a row; `name` is that of the draws (see `draw_counts`)."""
    array = np.asarray(values, dtype=float)
    drawn = draw_counts(len(array), *name)
    return ResampledMetric(float(array.mean()), drawn @ array / len(array), len(array))


def resample_statistic(of_rows: Numbers, reduce: Callable[[Numbers], float], *name: int) -> ResampledMetric:
    """A figure that `reduce` makes of the sum (k,) of what each row has, `of_rows` (rows, k), as corpus BLEU is."""
    drawn = draw_counts(len(of_rows), *name) @ of_rows
    value = reduce(of_rows.sum(0))
    return ResampledMetric(value, np.array([reduce(row) for row in drawn]), len(of_rows))


def resample_auroc(
    members: Numbers, non_members: Numbers, member_name: tuple[int, ...], other_name: tuple[int, ...]
) -> ResampledMetric:
    """The area under the ROC curve, ties halved; members and non-members are resampled independently."""
    wins = (members[:, None] > non_members[None]) + 0.5 * (members[:, None] == non_members[None])
    drawn = draw_counts(len(members), *member_name) @ wins * draw_counts(len(non_members), *other_name)
    replicates = drawn.sum(1) / wins.size
    return ResampledMetric(float(wins.mean()), replicates, min(wins.shape))


def average_metrics(figures: Sequence[ResampledMetric]) -> ResampledMetric:
    """The mean of several figures of the same seeds, replicate by replicate and seed by seed, as over clients."""
    return ResampledMetric(
        math.fsum(f.value for f in figures) / len(figures),
        np.mean([f.replicates for f in figures], axis=0),
        sum(f.count for f in figures),
        tuple(map(statistics.fmean, zip(*(f.seeds for f in figures), strict=True))),
    )


def over_seeds(figures: Sequence[ResampledMetric]) -> ResampledMetric:
    """One figure of the figures of several seeds."""
    values = tuple(f.value for f in figures)
    replicates = np.mean([f.replicates for f in figures], axis=0)
    return ResampledMetric(math.fsum(values) / len(values), replicates, sum(f.count for f in figures), values)


def compute_interval(figure: ResampledMetric) -> dict[str, Any]:
    """Value and 95 % interval over rows and seeds, as a result file has them; of several seeds, each one's value."""
    low, high = (float(q) for q in np.quantile(figure.replicates, (0.025, 0.975)))
    found = {"mean": figure.value, "low": low, "high": high, "n": figure.count}
    if len(figure.seeds) < 2:
        return found
    apart = student_t(len(figure.seeds) - 1) * _standard_error(figure.seeds)
    low = figure.value - math.hypot(max(0.0, figure.value - low), apart)
    high = figure.value + math.hypot(max(0.0, high - figure.value), apart)
    return found | {"low": low, "high": high, "seeds": list(figure.seeds)}


def of_rows(figure: ResampledMetric) -> ResampledMetric:
    """The figure as one of these trainings alone: its interval covers the rows, and asks nothing of other seeds."""
    return replace(figure, seeds=())


def p_value(figure: ResampledMetric, at: float = 0.0) -> float:
    """The least alpha of which the two-sided interval of 1 - alpha leaves `at` out; 1 for one seed or two.

    The part of the rows is scaled from that of 95 % as a normal one.
    """
    away = abs(figure.value - at)
    if 0 < len(figure.seeds) < SEEDS_TO_DECIDE or not away:
        return 1.0
    low, high = np.quantile(figure.replicates, (0.025, 0.975))
    rows = max(0.0, float(figure.value - low if figure.value > at else high - figure.value)) / _normal(0.05)
    error = _standard_error(figure.seeds) if figure.seeds else 0.0
    freedom = max(1, len(figure.seeds) - 1)
    least, most = math.log(_LEAST_P), 0.0
    for _ in range(_STEPS):
        middle = (least + most) / 2
        alpha = math.exp(middle)
        covered = math.hypot(rows * _normal(alpha), error * student_t(freedom, alpha)) >= away
        least, most = (middle, most) if covered else (least, middle)
    return math.exp(most)


def subtract_metrics(mine: ResampledMetric, other: ResampledMetric) -> ResampledMetric:
    """The figure `mine` less `other`, paired by resample and by seed; a figure that is not of seeds is the same in all.

    Raises:
        ValueError: figures of different numbers of seeds.
    """
    seeds = mine.seeds or other.seeds
    if mine.seeds and other.seeds and len(mine.seeds) != len(other.seeds):
        raise ValueError(f"expected figures of the same seeds, found {len(mine.seeds)} and {len(other.seeds)}")
    sides = [f.seeds or (f.value,) * len(seeds) for f in (mine, other)]
    paired = tuple(m - o for m, o in zip(*sides, strict=True))
    return ResampledMetric(mine.value - other.value, mine.replicates - other.replicates, mine.count, paired)


def compute_difference(mine: ResampledMetric, other: ResampledMetric) -> dict[str, Any]:
    """The interval of `mine` less `other`, paired."""
    return compute_interval(subtract_metrics(mine, other))


def negate_metric(figure: ResampledMetric) -> ResampledMetric:
    """The figure with the other sign."""
    return subtract_metrics(from_constant(0.0, figure.count), figure)


def format_interval(found: Mapping[str, float], form: str = ".3f") -> str:
    """An interval in a sentence: "0.512 [0.498, 0.527]"."""
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _normal(alpha: float) -> float:
    """Return the factor of a standard error for a two-sided normal interval of 1 - alpha."""
    return -statistics.NormalDist().inv_cdf(alpha / 2)
