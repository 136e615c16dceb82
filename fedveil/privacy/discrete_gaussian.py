"""The discrete Gaussian, P(x) ~ exp(-x^2 / (2 sigma^2)): integer noise drawn by inversion of its cumulative weights.

A draw is the number of thresholds t_j = floor(2^256 P(X <= j)) that a uniform 256-bit word reaches.
The word's first 64 bits decide, unless a threshold begins with exactly these bits; then the other 192 are also drawn.

Formal guarantees: the distribution is exact up to a total variation distance of `total_variation_bound`, and
with `os.urandom` the draws cannot be replayed. Draws involve no floats: thresholds are integers, computed from
weights with 60 more digits. Time and memory depend only on sigma. As with any table, looking up a
word causes cache misses that depend on the draw.

Sums of n such draws differ from one draw with n times the variance by tau (Kairouz, Liu, Steinke 2021, The
Distributed Discrete Gaussian Mechanism, Theorem 1). This is negligible once sigma is 4 or more.

| case | result |
|---|---|
| sigma below 4, or above 2^15 | ValueError: sums are not discrete Gaussian, or the table takes too much memory |
| |x| > 17 sigma | never drawn; its weight, below 2^-207, is in `total_variation_bound` |
"""

from __future__ import annotations

import decimal
import math
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from fedveil.privacy.gaussian_noise import Source

LEAST_SIGMA, MOST_SIGMA = 4.0, 32_768.0
TAIL = 17  # reach of the table, in sigmas
_BITS = 256  # bits in a threshold
_WORD = 64  # leading bits that almost always decide a draw
_SPARE = 200  # extra bits in the weights, so that a million products lose no bit of a threshold
_BLOCK = 1 << 16  # number of draws at a time


def max_draw(sigma: float) -> int:
    """Return the largest absolute value that a draw can have."""
    return math.ceil(TAIL * sigma)


def total_variation_bound(draws: int, sigma: float) -> float:
    """Bound the total variation distance between this many draws and exact draws."""
    table = (2 * max_draw(sigma) + 1) * 2.0**-_BITS
    return draws * (table + 2 * math.exp(-(TAIL**2) / 2))


def sum_divergence(summands: int, sigma: float) -> float:
    """Return the largest log-ratio between the weights of a sum of draws and of one draw with the same variance."""
    return 10 * sum(math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, summands))


def draw_discrete_gaussian(count: int, sigma: float, source: Source) -> NDArray[np.int64]:
    """Return independent draws. Raises ValueError for a sigma out of range."""
    if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma: expected {LEAST_SIGMA:g} to {MOST_SIGMA:g} integers, found {sigma:g}")
    firsts, low = _firsts(sigma), -max_draw(sigma)
    drawn = np.empty(count, np.int64)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        words = np.frombuffer(source(size * _WORD // 8), dtype="<u8")
        reached = np.searchsorted(firsts, words, side="right")
        # For a word below all thresholds, this reads index -1, which differs.
        for i in np.flatnonzero(firsts[reached - 1] == words):
            reached[i] = _of_a_tie(int(words[i]), sigma, source)
        drawn[start : start + size] = reached + low
    return drawn


def _of_a_tie(word: int, sigma: float, source: Source) -> int:
    """Decide a draw by all its bits. This is so rare (2^-44 of draws, largest table) that it rebuilds the table."""
    rest = int.from_bytes(source((_BITS - _WORD) // 8), "little")
    return bisect_right(cdf_thresholds(sigma), word << (_BITS - _WORD) | rest)


@lru_cache(maxsize=4)
def _firsts(sigma: float) -> NDArray[np.uint64]:
    shifted = (t >> (_BITS - _WORD) for t in cdf_thresholds(sigma))
    return np.fromiter(shifted, dtype=np.uint64, count=2 * max_draw(sigma))


def cdf_thresholds(sigma: float) -> list[int]:
    """Return floor(2^256 P(X <= j)) for j from -largest to largest - 1, where X is truncated."""
    one, half = 1 << (_BITS + _SPARE), _weights(sigma)
    mirrored = chain(reversed(half[1:]), half)
    total = 2 * sum(half) - half[0]
    sums = list(accumulate(mirrored))
    assert sums[-1] == total < one * len(sums)
    return [(s << _BITS) // total for s in sums[:-1]]


def _weights(sigma: float) -> list[int]:
    """Return exp(-k^2 / (2 sigma^2)) for k = 0, 1, ... in units of 2^-456, each from the previous one and a ratio."""
    bits = _BITS + _SPARE
    with decimal.localcontext() as context:
        context.prec = 160
        variance = decimal.Decimal(sigma) ** 2  # exact, because a float is a dyadic rational
        ratio = int((-1 / (2 * variance)).exp() * (1 << bits))
        falls = int((-1 / variance).exp() * (1 << bits))
    weights = [1 << bits]
    for _ in range(max_draw(sigma)):
        weights.append(weights[-1] * ratio >> bits)
        ratio = ratio * falls >> bits
    assert all(a >= b for a, b in pairwise(weights))
    return weights
