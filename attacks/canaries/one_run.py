"""A lower bound on epsilon from one training run: the auditor guesses the coins that included or excluded canaries.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run. NeurIPS 2023, arXiv 2305.08846, Theorem 5.2 and
Corollary 5.4. We did not have the paper: the formula is from appendix D, as quoted by other projects (such as
jax_privacy's `auditing`). The formula reproduces the two published values that they quote, from appendix D and section
7.

| paper | here | |
|---|---|---|
| m | canaries | coins, fair and independent of each other |
| r | guesses | made by an auditor who sees only the output and does not guess the other coins |
| v | correct | number of correct guesses |
| W | | the number of correct guesses if the mechanism were (epsilon, delta)-private |

    q = e^eps / (e^eps + 1),   f(v) = P[Binomial(r, q) >= v]
    P[W >= v] <= f(v) + 2 m delta max_(1 <= i <= v) (f(v - i) - f(v)) / i

Formal guarantees: the bound is above the mechanism's epsilon, at `delta`, with probability at most 1 - confidence. Two
data sets are neighbors if they differ in one coin. Guesses may depend on each other in any way. The number of guesses
is fixed in advance: `best_epsilon_bound` tries the numbers in `_PARTS` and several scores, and divides the error among
them (Bonferroni).

| case | result |
|---|---|
| no guesses, or no more correct guesses than chance would give | 0 |
| every guess correct | finite: m coins give a bound of at most about ln(m / ln(1 / (1 - confidence))) |
| all scores equal | random guesses: 0, except with probability 1 - confidence |
| delta 0 | only the binomial tail |

Adaptive note: a weak score gives a low bound, never a wrong one. A bound of 0 says nothing about privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from fedveil.attacks.statistics import Scores

__all__ = ["EpsilonLowerBound", "best_epsilon_bound", "epsilon_at_least", "p_value"]

_PARTS = (1, 2, 4)  # guess all coins, half of them, and a quarter
_LARGEST, _STEPS = 60.0, 45  # largest epsilon; number of halvings


@dataclass(frozen=True)
class EpsilonLowerBound:
    """Lower bound on epsilon from a single run.

    Attributes:
        epsilon: lower bound at `delta`; 0 means that nothing was shown.
        delta, confidence: parameters of the bound.
        score: name of the score that produced the bound.
        canaries, guesses, correct: m, r and v.
    """

    epsilon: float
    delta: float
    confidence: float
    score: str
    canaries: int
    guesses: int
    correct: int


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the maximum probability of this many correct guesses under (epsilon, delta)-privacy.

    Raises:
        ValueError: impossible counts, or an epsilon or delta out of range.
    """
    if not 0 <= correct <= guesses <= canaries or canaries < 1:
        raise ValueError(
            f"the counts must satisfy 0 <= correct <= guesses <= canaries, found {correct}, {guesses}, {canaries}"
        )
    if not (0 <= epsilon < math.inf and 0 <= delta <= 1):
        raise ValueError(f"epsilon must be at least 0, and delta from 0 to 1; found {epsilon} and {delta}")
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, q))
    if not delta or not correct:
        return min(1.0, tail)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, q))  # f(v - i) - f(v) for i = 1, 2, ...
    steepest = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * steepest)


@lru_cache(maxsize=1 << 12)
def epsilon_at_least(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest epsilon that this many correct guesses rule out at the given confidence; 0 if none.

    Raises:
        ValueError: like `p_value`, or a confidence that is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected more than 0 and less than 1, found {confidence}")
    low, high = 0.0, _LARGEST
    for _ in range(_STEPS):  # `low` is ruled out, or 0
        middle = (low + high) / 2
        ruled_out = p_value(canaries, guesses, correct, middle, delta) <= 1 - confidence
        low, high = (middle, high) if ruled_out else (low, middle)
    return low


def best_epsilon_bound(
    scores: Mapping[str, Scores], coins: NDArray[np.bool_], delta: float, confidence: float = 0.95
) -> EpsilonLowerBound:
    """Return the best bound over several scores and numbers of guesses, corrected for their number.

    Args:
        scores: arrays of shape (canaries,) by name, above 0 if the coin is more likely true; farther from 0 means more
            certain. They depend on the mechanism's output and not on the coins.
        coins: (canaries,) results of the coin flips.

    Raises:
        ValueError: no scores, a different number of scores than coins, or a non-finite score.
    """
    if not scores or not len(coins) or any(len(s) != len(coins) or not np.isfinite(s).all() for s in scores.values()):
        lengths = {name: len(s) for name, s in scores.items()}
        raise ValueError(f"each score needs {len(coins)} finite values, one per coin; found {lengths}")
    numbers = sorted({max(1, len(coins) // part) for part in _PARTS}, reverse=True)
    each = 1 - (1 - confidence) / (len(scores) * len(numbers))
    bounds = []
    for name, of_coins in scores.items():
        surest = np.argsort(-np.abs(of_coins), kind="stable")
        for guesses in numbers:
            at = surest[:guesses]
            correct = int(((of_coins[at] > 0) == coins[at]).sum())
            epsilon = epsilon_at_least(len(coins), guesses, correct, delta, each)
            bounds.append(EpsilonLowerBound(epsilon, delta, confidence, name, len(coins), guesses, correct))
    return max(bounds, key=lambda one: one.epsilon)
