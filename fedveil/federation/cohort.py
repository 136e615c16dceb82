"""Which sites take part in a round: seeded sampling without replacement, the same in one process and over gRPC."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedveil.rng import Stream


def draw(sites: Iterable[str], fraction: float, secret: bytes, round_: int, attempt: int = 0) -> list[str]:
    """ceil(fraction x sites) names, uniform without replacement, sorted.

    A repeated round draws a new cohort, so that one site that is down does not end the run.
    """
    ordered = sorted(sites)
    rng = Stream.derive(secret, round_, "", f"cohort {attempt}")
    return sorted(ordered[i] for i in rng.choice(len(ordered), size(len(ordered), fraction)))


def size(sites: int, fraction: float) -> int:
    """How many of so many sites a round draws."""
    return math.ceil(round(fraction * sites, 9))  # 0.3 * 10 is 3.0000000000000004
