"""Metrics with bootstrap replicates over rows, paired between the rows of a table, and averaged over seeds.

Within a seed, all metrics are recomputed on the same resamples of the test rows, members and non-members. So a
difference between two metrics in a table is a difference between paired replicates. Seeds share the names of their
draws, so that rows scored in several seeds count once.

An interval covers two sources of variation: the rows, through the replicates, and the training, through Student's t
over the seeds' own values, however few. They are combined as the limits of a sum of independent parts (Zou and Donner
2008):

    value -+ sqrt(half_rows^2 + (t_{seeds - 1} s / sqrt(seeds))^2)

If each seed draws new rows, s already contains their noise, and the interval is too wide, by a factor of at most 1.3
with three or more seeds. One seed gives no information about the training: its interval covers only the rows.

Two seeds give an interval but decide nothing: a metric with few possible values (accuracy on 60 rows) often agrees by
chance, and then shows no spread.
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
_STEPS = 30  # bisection steps for a probability's exponent: 8 digits
_LEAST_P = 1e-12


@dataclass(frozen=True)
class ResampledMetric:
    """A metric of one or several seeds.

    Attributes:
        value: the value on the rows themselves; the mean for several seeds.
        replicates: (REPLICATES,), the value on each resample of the rows.
        count: number of rows behind the value; for members and non-members, the smaller number.
        seeds: the value of each seed; empty unless the metric comes from `over_seeds`.
    """

    value: float
    replicates: Numbers
    count: int
    seeds: tuple[float, ...] = ()

    def to_json(self) -> list[Any]:
        """Return [value, replicates, count], for sending between processes."""
        return [self.value, self.replicates.tolist(), self.count]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> ResampledMetric:
        """Return the metric from the output of `to_json`."""
        value, replicates, count = found
        return cls(value, np.array(replicates), count)


def from_constant(value: float, count: int = 1) -> ResampledMetric:
    """Return a metric without rows, which therefore has an interval of zero width."""
    return ResampledMetric(value, np.full(REPLICATES, value), count)


def draw_counts(rows: int, *name: int) -> Numbers:
    """Return (REPLICATES, rows): how often each row is in each resample. The same `name` gives the same draws."""
    rng = np.random.default_rng([rows, *name])
    return rng.multinomial(rows, np.full(rows, 1 / rows), size=REPLICATES).astype(float)


def resample_mean(values: Sequence[float], *name: int) -> ResampledMetric:
    """Return the mean over rows of one value per row; `name` is the name of the draws (see `draw_counts`)."""
    array = np.asarray(values, dtype=float)
    drawn = draw_counts(len(array), *name)
    return ResampledMetric(float(array.mean()), drawn @ array / len(array), len(array))


def resample_statistic(of_rows: Numbers, reduce: Callable[[Numbers], float], *name: int) -> ResampledMetric:
    """Return the metric that `reduce` computes from the sum (k,) of `of_rows` (rows, k), as for corpus BLEU."""
    drawn = draw_counts(len(of_rows), *name) @ of_rows
    value = reduce(of_rows.sum(0))
    return ResampledMetric(value, np.array([reduce(row) for row in drawn]), len(of_rows))


def resample_auroc(
    members: Numbers, non_members: Numbers, member_name: tuple[int, ...], other_name: tuple[int, ...]
) -> ResampledMetric:
    """Return the area under the ROC curve; ties count one half. Members and non-members are resampled independently."""
    wins = (members[:, None] > non_members[None]) + 0.5 * (members[:, None] == non_members[None])
    drawn = draw_counts(len(members), *member_name) @ wins * draw_counts(len(non_members), *other_name)
    replicates = drawn.sum(1) / wins.size
    return ResampledMetric(float(wins.mean()), replicates, min(wins.shape))


def average_metrics(figures: Sequence[ResampledMetric]) -> ResampledMetric:
    """Return the mean of several metrics from the same seeds (for example, over clients), by replicate and seed."""
    return ResampledMetric(
        math.fsum(f.value for f in figures) / len(figures),
        np.mean([f.replicates for f in figures], axis=0),
        sum(f.count for f in figures),
        tuple(map(statistics.fmean, zip(*(f.seeds for f in figures), strict=True))),
    )


def over_seeds(figures: Sequence[ResampledMetric]) -> ResampledMetric:
    """Combine the metrics of several seeds into one."""
    values = tuple(f.value for f in figures)
    replicates = np.mean([f.replicates for f in figures], axis=0)
    return ResampledMetric(math.fsum(values) / len(values), replicates, sum(f.count for f in figures), values)


def compute_interval(figure: ResampledMetric) -> dict[str, Any]:
    """Return the value and 95% interval over rows and seeds, as in a result file; for several seeds, all values."""
    low, high = (float(q) for q in np.quantile(figure.replicates, (0.025, 0.975)))
    found = {"mean": figure.value, "low": low, "high": high, "n": figure.count}
    if len(figure.seeds) < 2:
        return found
    apart = student_t(len(figure.seeds) - 1) * _standard_error(figure.seeds)
    low = figure.value - math.hypot(max(0.0, figure.value - low), apart)
    high = figure.value + math.hypot(max(0.0, high - figure.value), apart)
    return found | {"low": low, "high": high, "seeds": list(figure.seeds)}


def of_rows(figure: ResampledMetric) -> ResampledMetric:
    """Return the metric for these training runs only: its interval covers the rows, but not other seeds."""
    return replace(figure, seeds=())


def p_value(figure: ResampledMetric, at: float = 0.0) -> float:
    """Return the smallest alpha for which the two-sided 1 - alpha interval excludes `at`; 1 for one or two seeds.

    The rows' part of the interval is scaled from its 95% width, as for a normal distribution.
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
    """Return `mine` minus `other`, paired by resample and seed; a metric without seeds is used for every seed.

    Raises:
        ValueError: the metrics have different numbers of seeds.
    """
    seeds = mine.seeds or other.seeds
    if mine.seeds and other.seeds and len(mine.seeds) != len(other.seeds):
        raise ValueError(f"expected figures for the same seeds, found {len(mine.seeds)} and {len(other.seeds)}")
    sides = [f.seeds or (f.value,) * len(seeds) for f in (mine, other)]
    paired = tuple(m - o for m, o in zip(*sides, strict=True))
    return ResampledMetric(mine.value - other.value, mine.replicates - other.replicates, mine.count, paired)


def compute_difference(mine: ResampledMetric, other: ResampledMetric) -> dict[str, Any]:
    """Return the interval of `mine` minus `other`, paired."""
    return compute_interval(subtract_metrics(mine, other))


def negate_metric(figure: ResampledMetric) -> ResampledMetric:
    """Return the metric with the opposite sign."""
    return subtract_metrics(from_constant(0.0, figure.count), figure)


def format_interval(found: Mapping[str, float], form: str = ".3f") -> str:
    """Format an interval for a sentence: "0.512 [0.498, 0.527]"."""
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _normal(alpha: float) -> float:
    """Return the number of standard errors for a two-sided normal interval of 1 - alpha."""
    return -statistics.NormalDist().inv_cdf(alpha / 2)
