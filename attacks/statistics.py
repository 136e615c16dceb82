"""Statistics of how well scores separate members from non-members, computed in NumPy on the CPU without a model.

A higher score means that an example is more likely a member. No statistic is ever flipped: a value below
0.5 stays below 0.5.

| function | source |
|---|---|
| `area_under_roc` | Mann and Whitney 1947 |
| `rank_test` | Mann and Whitney 1947; within labels van Elteren 1960 |
| `hanley_mcneil` | Hanley and McNeil 1982 |
| `tpr_at_fpr` | Carlini et al. 2022, Membership Inference Attacks From First Principles, section II |
| `clopper_pearson` | Clopper and Pearson 1934 |
| `epsilon_lower_bound` | Jagielski, Ullman, Oprea 2020; Nasr et al. 2021, https://arxiv.org/abs/2101.04535 |
| `canary_epsilon` | Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning |
| `holm_correction` | Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "IntervalEstimate",
    "OfDraws",
    "Scores",
    "Statistic",
    "area_under_roc",
    "areas_under_roc",
    "bootstrap_interval",
    "clopper_pearson",
    "confidence_interval",
    "confidence_intervals",
    "epsilon_lower_bound",
    "holm_correction",
    "rank_test",
    "student_t",
    "tpr_at_fpr",
    "tprs_at_fpr",
    "two_sided",
]

Scores = NDArray[np.float64]
Statistic = Callable[[Scores, Scores], float]
OfDraws = Callable[
    [Scores, Scores], Scores
]  # one value per resample, from scores of shape (draws, rows): `areas_under_roc`, `tprs_at_fpr`
_MOST_DRAWN = 1 << 20  # maximum number of resampled scores in memory at a time: 8 MB
_RANK_RATIO = 3  # ratio of successive ranks at which epsilon is bounded
_BOUND_STEPS = 200  # halvings of an interval: beyond double precision


@dataclass(frozen=True)
class IntervalEstimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


def area_under_roc(members: Scores, non_members: Scores) -> float:
    """Return P(a member scores above a non-member), counting ties as half. Raises ValueError if a side is empty or
    has a NaN."""
    _check(members, non_members)
    ordered = np.sort(non_members)
    below = np.searchsorted(ordered, members, "left")
    not_above = np.searchsorted(ordered, members, "right")
    return float((below + not_above).sum() / (2 * len(members) * len(non_members)))


def tpr_at_fpr(members: Scores, non_members: Scores, fpr: float) -> float:
    """Return the fraction of members above the lowest threshold that at most `fpr` of the non-members exceed.

    The threshold is a non-member's own score, so that ties count for neither side. With fewer than 1 / fpr non-members,
    none of them may exceed the threshold.

    Raises:
        ValueError: an fpr outside 0 to 1, an empty side or a NaN.
    """
    _check(members, non_members)
    return float(tprs_at_fpr(members[None], non_members[None], fpr)[0])


def areas_under_roc(members: Scores, non_members: Scores) -> Scores:
    """Return `area_under_roc` for each row of (draws, members) and (draws, non-members); neither may be empty."""
    from scipy.stats import rankdata  # takes a second to load

    ranks = rankdata(np.concatenate((members, non_members), axis=1), axis=1)
    count, pairs = members.shape[1], members.shape[1] * non_members.shape[1]
    return np.asarray((2 * ranks[:, :count].sum(1) - count * (count + 1)) / (2 * pairs))


def tprs_at_fpr(members: Scores, non_members: Scores, fpr: float) -> Scores:
    """Return `tpr_at_fpr` for each row, like `areas_under_roc`. Raises ValueError for an fpr outside 0 to 1."""
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr: expected a rate from 0 to 1, found {fpr}")
    count = non_members.shape[1]
    allowed = math.floor(fpr * count + 1e-9)
    if allowed >= count:
        return np.ones(len(members))
    at = count - 1 - allowed
    thresholds = np.partition(non_members, at, axis=1)[:, at]
    return np.asarray((members > thresholds[:, None]).mean(1))


def bootstrap_interval(
    statistic: OfDraws, members: Scores, non_members: Scores, rng: np.random.Generator, resamples: int = 1000
) -> IntervalEstimate:
    """Return the statistic with its 95% percentile interval; members and non-members are resampled independently."""
    _check(members, non_members)
    at_once = max(1, _MOST_DRAWN // (len(members) + len(non_members)))
    drawn: list[float] = []
    while len(drawn) < resamples:
        at = [
            (rng.integers(len(members), size=len(members)), rng.integers(len(non_members), size=len(non_members)))
            for _ in range(min(at_once, resamples - len(drawn)))
        ]
        drawn += statistic(members[[m for m, _ in at]], non_members[[n for _, n in at]]).tolist()
    low, high = np.quantile(drawn, (0.025, 0.975))
    return IntervalEstimate(float(statistic(members[None], non_members[None])[0]), float(low), float(high))


def rank_test(
    members: Scores, non_members: Scores, member_labels: Sequence[str] = (), other_labels: Sequence[str] = ()
) -> float:
    """Return z of the rank sums within labels: standard normal if members and non-members of a label score alike.

    z is above 0 if members score higher. Labels are weighted for minimum variance; without labels this is the
    Mann-Whitney test with ties. z is 0 if no label has examples on both sides, or if all scores in a label are equal.
    """
    _check(members, non_members)
    mine, theirs = (np.asarray(of) if len(of) else np.zeros(n) for of, n in (
        (member_labels, len(members)), (other_labels, len(non_members)),
    ))  # fmt: skip
    total = variance = 0.0
    for label in set(mine.tolist()) & set(theirs.tolist()):
        m, o = members[mine == label], non_members[theirs == label]
        size, pairs = len(m) + len(o), len(m) * len(o)
        tied = np.unique(np.concatenate((m, o)), return_counts=True)[1]
        weight = pairs / (size + 1)
        total += weight * (area_under_roc(m, o) - 0.5)
        variance += weight**2 * (size + 1 - float((tied**3 - tied).sum()) / (size * (size - 1))) / (12 * pairs)
    return total / math.sqrt(variance) if variance > 1e-12 else 0.0


def two_sided(z: float) -> float:
    """Return the probability that a standard normal variable is farther from 0 than z."""
    return math.erfc(abs(z) / math.sqrt(2))


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return Holm-corrected p-values: the chance that any true null hypothesis is rejected at alpha is at most alpha.

    This holds for any dependence between the tests.
    """
    corrected_p, highest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected_p[i] = highest
    return corrected_p


@lru_cache(maxsize=1 << 14)  # a bound requests the same counts at many thresholds
def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact confidence interval for a binomial probability. Raises ValueError for impossible counts."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes are impossible in {trials} trials; at least one trial is required")
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _root(lambda p: _at_least(successes, trials, p) - tail)
    high = 1.0 if successes == trials else _root(lambda p: tail - (1 - _at_least(successes + 1, trials, p)))
    return low, high


def epsilon_lower_bound(
    members: Scores, non_members: Scores, delta: float, rng: np.random.Generator, confidence: float = 0.95
) -> float:
    """Return a lower bound on the epsilon, at `delta`, of the training behind the scores.

        TPR <= e^eps FPR + delta   =>   eps >= ln((TPR_low - delta) / FPR_high)

    The thresholds are the scores of the non-members of rank 1, 3, 9, ... from the top, so the number of thresholds does
    not depend on the scores. At the threshold of rank j, the false positive rate is Beta(j, n - j + 1) and independent
    of the number of members above it, which is binomial. So each pair of bounds is exact, and the best of them holds
    with a Bonferroni correction. A third of the error goes to the first rank, which matters most when scores hardly
    overlap. Equal scores are ordered at random. Memory is linear in the number of scores, not quadratic.

    Formal guarantees: the bound fails with probability at most 1 - confidence. The membership of each example must be
    independent of the others. Several examples of one trained model are not independent, so on one model the bound is
    an indication, not a proof.
    """
    _check(members, non_members)
    scores = np.concatenate([members, non_members])
    place = np.empty(len(scores), np.int64)
    place[np.lexsort((rng.random(len(scores)), scores))] = np.arange(len(scores))
    mine, theirs = np.sort(place[: len(members)]), np.sort(place[len(members) :])[::-1]
    ranks = [1]
    while ranks[-1] * _RANK_RATIO <= len(theirs):
        ranks.append(ranks[-1] * _RANK_RATIO)
    error, bound = 1 - confidence, 0.0
    above = len(mine) - np.searchsorted(mine, theirs[np.array(ranks) - 1], side="right")
    for rank, found in zip(ranks, above.tolist(), strict=True):
        share = 1.0 if len(ranks) == 1 else 1 / 3 if rank == 1 else 2 / 3 / (len(ranks) - 1)
        tpr_low = clopper_pearson(found, len(mine), 1 - error * share)[0]
        fpr_high = clopper_pearson(rank - 1, len(theirs), 1 - error * share)[1]
        if tpr_low > delta:
            bound = max(bound, math.log((tpr_low - delta) / fpr_high))
    return bound


def _at_least(successes: int, trials: int, p: float) -> float:
    """Return P(Binomial(trials, p) >= successes)."""
    if p <= 0 or p >= 1:
        return float(successes == 0 or p >= 1)
    k = np.arange(successes, trials + 1)
    return float(np.exp(_log_choose(trials)[successes:] + k * math.log(p) + (trials - k) * math.log1p(-p)).sum())


@lru_cache(maxsize=16)
def _log_choose(trials: int) -> Scores:
    """Return ln C(trials, k) for k = 0 ... trials."""
    factorials = np.array([math.lgamma(k + 1) for k in range(trials + 1)])
    return np.asarray(factorials[-1] - factorials - factorials[::-1])


def _root(rising: Callable[[float], float]) -> float:
    """Find the zero of an increasing function on [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(_BOUND_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
        if high - low < 1e-12:
            break
    return (low + high) / 2


def _check(members: Scores, non_members: Scores) -> None:
    if not len(members) or not len(non_members):
        raise ValueError(f"both members and non-members need scores, found {len(members)} and {len(non_members)}")
    if np.isnan(members).any() or np.isnan(non_members).any():
        raise ValueError("some scores are NaN")


def student_t(freedom: int, alpha: float = 0.05) -> float:
    """Return the number of standard errors in half a two-sided interval of 1 - alpha, given the degrees of freedom."""
    from scipy.special import stdtrit  # slow to import

    return -float(stdtrit(freedom, alpha / 2))


def confidence_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean with its 95% Student t interval; for a single value, n = 1 and the interval has no width."""
    mean, n = statistics.fmean(values), len(values)
    half = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def confidence_intervals(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the `confidence_interval`, over runs, of each metric present in all runs."""
    shared = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: confidence_interval([run[name] for run in runs]) for name in shared}
