"""Success rates of independent trials, such as image searches, with exact intervals and verdicts.

If a few trials all end the same way, they have no spread, and Student's t would give an interval of zero width. So this
module uses the Clopper-Pearson interval (1934), and a verdict's p-value is twice the smaller binomial tail.

| trials | result |
|---|---|
| all end the same way | an interval of nonzero width: 0.735 to 1 for 12 of 12 |
| one or two | an interval, but no verdict |
| none | ValueError |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from scipy.stats import binom

from fedveil.attacks.statistics import clopper_pearson
from fedveil_bench.common import resampling
from fedveil_bench.common.verdicts import FAILS, HOLDS, OPEN, ClaimSentence


def compute_share_interval(found: Sequence[bool]) -> dict[str, Any]:
    """Return the share of successful trials with its 95% interval, as in a result file; each trial is a seed."""
    low, high = clopper_pearson(sum(found), len(found))
    return {
        "mean": sum(found) / len(found),
        "low": low,
        "high": high,
        "n": len(found),
        "seeds": list(map(float, found)),
    }


def judge_share(found: Sequence[bool], side: Literal["higher", "lower"], than: float) -> ClaimSentence:
    """Judge whether the probability of success is on the given side of `than`."""
    count, trials = sum(found), len(found)
    above = count > trials * than
    tail = binom.sf(count - 1, trials, than) if above else binom.cdf(count, trials, than)
    p = min(1.0, 2 * float(tail)) if trials >= resampling.SEEDS_TO_DECIDE else 1.0
    return ClaimSentence(HOLDS if above == (side == "higher") else FAILS, p, OPEN)
