"""Integer noise compared with its exact weights, and with a plain version of Canonne, Kamath and Steinke's sampler."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from fedveil.privacy import discrete_gaussian
from fedveil.rng import RandomStream

_ONE_IN_100_000 = 50.5  # chi-square with 15 degrees of freedom is above it so rarely


def stream(seed: int):
    return RandomStream.derive(bytes(32), seed, "test", "discrete").bytes


def drawn(count: int, sigma: float, seed: int = 0) -> np.ndarray:
    return discrete_gaussian.draw_discrete_gaussian(count, sigma, stream(seed))


def chi_square(values: np.ndarray, expected: dict[int, float]) -> float:
    """Of counts in cells of single integers, and of all others as one more cell."""
    inside = sum((np.count_nonzero(values == x) - e) ** 2 / e for x, e in expected.items())
    rest, wanted = np.count_nonzero(~np.isin(values, list(expected))), len(values) - sum(expected.values())
    return inside + (rest - wanted) ** 2 / wanted


@pytest.mark.parametrize("sigma", [4.0, 2.71828 * 2])
def test_counts_are_those_of_the_exact_weights(sigma):
    count = 400_000
    weights = {x: math.exp(-(x**2) / (2 * sigma**2)) for x in range(-200, 201)}
    total = sum(weights.values())
    cells = {x: count * weights[x] / total for x in range(-7, 8)}
    assert chi_square(drawn(count, sigma), cells) < _ONE_IN_100_000


@pytest.mark.parametrize("sigma", [4.0, 314.159, 5_000.5])
def test_mean_and_variance(sigma):
    """Within 5 standard errors. The variance of a discrete Gaussian this wide is sigma^2 beyond what fp64 shows."""
    count = 200_000
    values = drawn(count, sigma, 1)
    assert abs(values.mean()) < 5 * sigma / count**0.5
    assert values.var() == pytest.approx(sigma**2, rel=5 * (2 / count) ** 0.5)


def test_tails_are_as_heavy_as_they_must_be():
    """Beyond 3 sigma: their exact probability, within 5 standard errors."""
    count, sigma = 400_000, 17.5
    p = 2 * sum(math.exp(-((x / sigma) ** 2) / 2) for x in range(53, 300)) / (sigma * math.sqrt(2 * math.pi))
    tail_count = np.count_nonzero(np.abs(drawn(count, sigma, 2)) >= 53)
    assert tail_count == pytest.approx(count * p, abs=5 * (count * p) ** 0.5)


@pytest.mark.parametrize("sigma", [4.0, 11.25])
def test_thresholds_are_the_cumulative_weights_to_256_bits(sigma):
    """By symmetry P(X <= -1) + P(X <= 0) = 1; neighbours' weights have the ratio exp((2 x - 1) / (2 sigma^2))."""
    thresholds, zero = discrete_gaussian.cdf_thresholds(sigma), discrete_gaussian.max_draw(sigma)
    assert len(thresholds) == 2 * zero
    assert abs(thresholds[zero - 1] + thresholds[zero] - 2**256) <= 2
    for x in (1, 5, 30):
        ratio = Fraction(
            thresholds[zero + x - 1] - thresholds[zero + x - 2], thresholds[zero + x] - thresholds[zero + x - 1]
        )
        assert float(ratio) == pytest.approx(math.exp((2 * x - 1) / (2 * sigma**2)), rel=1e-13)


def test_a_word_in_which_a_threshold_lies_is_decided_by_the_bits_behind_it():
    """With the bits just below the threshold, and with those at it."""
    sigma = 4.0
    table, low = discrete_gaussian.cdf_thresholds(sigma), -discrete_gaussian.max_draw(sigma)
    place = len(table) // 2 + 3
    for above in (0, 1):
        whole = table[place] - 1 + above
        word, rest = divmod(whole, 1 << 192)
        source = iter([word.to_bytes(8, "little"), rest.to_bytes(24, "little")])
        assert discrete_gaussian.draw_discrete_gaussian(1, sigma, lambda n, s=source: next(s)).tolist() == [
            low + place + above
        ]


def test_the_first_and_the_last_word_give_the_ends_of_the_table():
    sigma, most = 4.0, discrete_gaussian.max_draw(4.0)
    assert discrete_gaussian.draw_discrete_gaussian(1, sigma, bytes).tolist() == [-most]
    assert discrete_gaussian.draw_discrete_gaussian(1, sigma, lambda n: b"\xff" * n).tolist() == [most]


@pytest.mark.parametrize("sigma", [3.999, 32_769.0, math.nan, math.inf])
def test_a_sigma_that_no_table_fits_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma: expected 4 to 32768"):
        discrete_gaussian.draw_discrete_gaussian(1, sigma, bytes)


def test_draws_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch):
    whole = drawn(1000, 20.0)
    monkeypatch.setattr(discrete_gaussian, "_BLOCK", 77)
    assert drawn(1000, 20.0).tolist() == whole.tolist()


def bernoulli(p: Fraction, rng: random.Random) -> bool:
    return rng.randrange(p.denominator) < p.numerator


def bernoulli_exp(gamma: Fraction, rng: random.Random) -> bool:
    """True with probability exp(-gamma): Algorithm 1 of Canonne, Kamath, Steinke."""
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), rng):
            return False
        gamma -= 1
    k = 1
    while bernoulli(gamma / k, rng):
        k += 1
    return k % 2 == 1


def laplace(t: int, rng: random.Random) -> int:
    """Their Algorithm 2 with s = 1."""
    while True:
        u = rng.randrange(t)
        if not bernoulli_exp(Fraction(u, t), rng):
            continue
        v = 0
        while bernoulli_exp(Fraction(1), rng):
            v += 1
        sign = bernoulli(Fraction(1, 2), rng)
        if sign and u + t * v == 0:
            continue
        return -(u + t * v) if sign else u + t * v


def exact(variance: Fraction, rng: random.Random) -> int:
    """Their Algorithm 3: nothing but integers."""
    t = math.isqrt(math.floor(variance)) + 1
    while True:
        y = laplace(t, rng)
        if bernoulli_exp((abs(y) - variance / t) ** 2 / (2 * variance), rng):
            return y


@pytest.mark.long
def test_draws_are_distributed_as_those_of_the_exact_sampler():
    """Two samples of 20,000 each, in 16 cells: chi-square of their difference."""
    sigma, count, rng = 5.5, 20_000, random.Random(8)
    theirs = np.array([exact(Fraction(sigma) ** 2, rng) for _ in range(count)])
    edges = np.arange(-14, 15, 2)
    ours, twin = (np.histogram(np.clip(v, -15, 14), [-16, *edges, 16])[0] for v in (drawn(count, sigma, 5), theirs))
    assert len(ours) == 16
    assert ((ours - twin) ** 2 / (ours + twin)).sum() < _ONE_IN_100_000


def test_what_the_table_and_the_sum_take_is_nothing_beside_any_delta():
    assert discrete_gaussian.total_variation_bound(10**8 * 10**4, 32_768.0) < 1e-47
    assert discrete_gaussian.sum_divergence(1, 4.0) == 0.0
    assert discrete_gaussian.sum_divergence(10_000, 4.0) * 1e8**0.5 < 1e-59
    assert discrete_gaussian.sum_divergence(3, 1.0) == pytest.approx(
        10 * (math.exp(-(math.pi**2)) + math.exp(-4 * math.pi**2 / 3))
    )
