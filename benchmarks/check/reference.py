"""The statistics of the results, written from their definitions on numpy and scipy.

| statistic | definition |
|---|---|
| interval over seeds | mean -+ t(0.975, n - 1) s / sqrt(n) (Student 1908) |
| interval over rows and seeds | both half-widths added in quadrature, on each side (Zou and Donner 2008) |
| share of n trials | the exact binomial interval (Clopper and Pearson 1934) |
| correction | Holm 1979: sort p, multiply by the number of hypotheses left, take the running maximum |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special, stats

ALPHA = 0.04  # for all verdicts of a table together
SEEDS_TO_DECIDE = 3
_LEAST_P = 1e-12


def compute_mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return math.fsum(values) / len(values)


def compute_standard_error(values: Sequence[float]) -> float:
    """Return s / sqrt(n), for at least two values."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def compute_half_width(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % Student interval for the mean."""
    return float(special.stdtrit(len(values) - 1, 0.975)) * compute_standard_error(values)


def compute_share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact 95 % interval for a binomial share."""
    found = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    return float(found.low), float(found.high)


def compute_p_value(distance: float, rows: float, values: Sequence[float]) -> float:
    """Return the two-sided p-value of a value at this distance from the bound of a claim.

    Args:
        distance: the value's distance from the bound, not negative.
        rows: half-width of the rows' part of the 95 % interval, on the side of the bound; 0 if it covers only seeds.
        values: each seed's value; empty for an interval over rows alone.
    """
    if not distance or 0 < len(values) < SEEDS_TO_DECIDE:
        return 1.0
    error = compute_standard_error(values) if len(values) else 0.0
    deviation = rows / float(special.ndtri(0.975))
    if not deviation:
        return float(2 * special.stdtr(len(values) - 1, -distance / error)) if error else 0.0
    if not error:
        return float(2 * special.ndtr(-distance / deviation))

    def excess(log_p: float) -> float:
        half = math.exp(log_p) / 2
        rows_part, seeds_part = deviation * special.ndtri(half), error * special.stdtrit(len(values) - 1, half)
        return math.hypot(rows_part, seeds_part) - distance

    if excess(math.log(_LEAST_P)) < 0:
        return _LEAST_P
    return math.exp(optimize.brentq(excess, math.log(_LEAST_P), 0.0))


def compute_share_p_value(successes: int, trials: int, share: float) -> float:
    """Return twice the smaller binomial tail for this many successes, if the true share were `share`."""
    if trials < SEEDS_TO_DECIDE:
        return 1.0
    side = "greater" if successes > trials * share else "less"
    return min(1.0, 2 * float(stats.binomtest(successes, trials, share, side).pvalue))


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for all of them."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[at])
        corrected[at] = min(1.0, largest)
    return corrected
