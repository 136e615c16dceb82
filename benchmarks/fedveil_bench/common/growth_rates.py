"""Growth of a metric, by least squares with a 95% interval: its exponent over sizes, or its slope over rounds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from fedveil.attacks.statistics import student_t

_BLOCKS = 10


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Return a in value ~ size^a: the slope of log(value) over log(size). Raises ValueError unless all are above 0."""
    return fit_slope([math.log(size) for size in sizes], [math.log(value) for value in values])


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Return the slope of the line through the points. Two points give no interval; the result then has n = 2.

    Raises:
        ValueError: all points have the same x.
    """
    n, x_mean, y_mean = len(xs), statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    if not spread:
        raise ValueError(f"slope: expected points at two places or more, found {n} at {x_mean:g}")
    found = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - y_mean - found * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = student_t(n - 2) * math.sqrt(left / (n - 2) / spread) if n > 2 else 0.0
    return {"mean": found, "low": found - half, "high": found + half, "n": n}


def slope_by_round(values: Sequence[float]) -> dict[str, float]:
    """Return the slope per round, fitted to the means of ten blocks of rounds.

    Memory grows in steps and does not shrink, so individual rounds are not independent, and an interval based on them
    would be far too narrow. Fewer than ten rounds are used individually.
    """
    size = max(1, len(values) // _BLOCKS)
    blocks = [values[at : at + size] for at in range(0, len(values) - size + 1, size)]
    middles = [at * size + (size - 1) / 2 for at in range(len(blocks))]
    return fit_slope(middles, [statistics.fmean(block) for block in blocks])


def thin_curve(values: Sequence[float], most: int = 100) -> list[float]:
    """Return at most `most` evenly spaced values, for a curve."""
    return [round(value, 2) for value in itertools.islice(values, 0, None, -(-len(values) // most) or 1)]
