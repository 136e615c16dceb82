"""Compute the bytes that a row needs to reach a target, from the curves in a result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

MARGIN = 0.02  # nats above the target row's last value
_MEGA = 1e6


def compute_costs(
    curve: Sequence[Mapping[str, Any]], target: Sequence[Mapping[str, Any]], metric: str, what: str
) -> list[float]:
    """Return each seed's MB until the curve first reaches its target, interpolated linearly between points.

    Raises:
        ValueError: a seed never reaches its target.
    """
    ends = target[-1]["metrics"][metric]["seeds"]
    return [_compute_cost(curve, metric, seed, end + MARGIN, what) for seed, end in enumerate(ends)]


def _compute_cost(curve: Sequence[Mapping[str, Any]], metric: str, seed: int, wanted: float, what: str) -> float:
    points = [(point["metrics"][metric]["seeds"][seed], _count_megabytes(point, what)) for point in curve]
    for (above, before), (below, after) in pairwise([points[0], *points]):
        if below <= wanted:
            share = (above - wanted) / (above - below) if below < above else 1.0
            return before + share * (after - before)
    raise ValueError(f"seed {seed}: expected a curve that reaches {wanted:g}, found {points[-1][0]:g} at its end")


def _count_megabytes(point: Mapping[str, Any], what: str) -> float:
    down = point["download_bytes"] if what == "Uploads and downloads" else 0
    return float(point["upload_bytes"] + down) / _MEGA
