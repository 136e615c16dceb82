"""Who takes part: seeded sampling without replacement, the same in process and over the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedveil.rng import Stream


def draw(sites: Iterable[str], fraction: float, secret: bytes, round_: int, attempt: int = 0) -> list[str]:
    """ceil(fraction x sites) names, uniform without replacement, sorted.

    A repeated round draws anew, so that a site which is down does not end the run.
    """
    ordered = sorted(sites)
    size = math.ceil(round(fraction * len(ordered), 9))  # 0.3 * 10 is 3.0000000000000004
    rng = Stream.derive(secret, round_, "", f"cohort {attempt}")
    return sorted(ordered[i] for i in rng.choice(len(ordered), size))
