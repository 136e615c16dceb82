"""A bound from one run, compared with closed forms, a simple reference, and mechanisms with a known epsilon."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import gaussian_mechanism

from fedveil.attacks.canaries.one_run import best_epsilon_bound, epsilon_at_least, p_value
from fedveil.attacks.statistics import clopper_pearson

DELTA = 1e-5


def naive(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """The theorem, term by term, in fractions."""
    q = Fraction(math.exp(eps)) / (Fraction(math.exp(eps)) + 1)

    def f(least: int) -> Fraction:
        return sum((math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(0, least), r + 1)), Fraction(0))

    steepest = max([(f(v - i) - f(v)) / i for i in range(1, v + 1)] or [Fraction(0)])
    return float(min(Fraction(1), f(v) + 2 * m * Fraction(delta) * steepest))


@pytest.mark.parametrize("m, r, v", [(1, 1, 1), (7, 5, 0), (12, 12, 12), (20, 13, 9), (20, 0, 0), (31, 17, 16)])
@pytest.mark.parametrize("eps", [0.0, 0.31415, 2.71828])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.0031])
def test_the_theorem_term_by_term(m, r, v, eps, delta):
    assert p_value(m, r, v, eps, delta) == pytest.approx(naive(m, r, v, eps, delta), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("m", [10, 100, 1000])
def test_with_every_guess_right_the_bound_has_a_closed_form(m):
    """q^m = 0.05, so eps = ln(q / (1 - q))."""
    q = 0.05 ** (1 / m)
    assert epsilon_at_least(m, m, m, 0.0) == pytest.approx(math.log(q / (1 - q)), rel=1e-9)


def test_without_delta_it_is_the_log_odds_of_the_one_sided_interval_of_clopper_and_pearson():
    low, _ = clopper_pearson(75, 100, 0.9)
    assert epsilon_at_least(100, 100, 75, 0.0) == pytest.approx(math.log(low / (1 - low)), rel=1e-6)


@pytest.mark.parametrize(
    ("counts", "delta", "published"), [((1000, 100, 75), 1e-4, 0.673), ((100_000, 1510, 1439), 1e-5, 2.675)]
)
def test_published_values(counts, delta, published):
    """Of appendix D and of section 7, as other projects quote them."""
    assert epsilon_at_least(*counts, delta) == pytest.approx(published, abs=1e-3)


@pytest.mark.long
def test_a_delta_lowers_the_bound_to_where_the_twin_says_five_percent():
    epsilon = epsilon_at_least(100, 100, 75, 1e-3)
    assert 0 < epsilon < epsilon_at_least(100, 100, 75, 0.0)
    assert naive(100, 100, 75, epsilon, 1e-3) == pytest.approx(0.05, rel=1e-6)


def test_a_larger_epsilon_is_never_ruled_out_where_a_smaller_one_is_not():
    for m, r, v, delta in [(200, 200, 150, 1e-5), (200, 100, 99, 1e-3), (50, 50, 50, 1e-2), (400, 100, 80, 1e-4)]:
        p = np.array([p_value(m, r, v, eps, delta) for eps in np.linspace(0, 8, 400)])
        decided = p <= 0.05
        assert (np.diff(decided.astype(int)) <= 0).all()


@pytest.mark.parametrize("guessed", [(0, 0), (100, 50), (100, 40)])
def test_guesses_no_better_than_chance_bound_nothing(guessed):
    assert epsilon_at_least(100, *guessed, DELTA) == 0.0


def coins_of(rng, m: int) -> np.ndarray:
    return rng.random(m) < 0.5


@pytest.mark.parametrize("eps", [0.0, 0.5, 2.0])
def test_of_randomized_response_it_is_rarely_above_the_truth_and_often_near(eps):
    """Each coin is told right with e^eps / (e^eps + 1). Some coins are told more surely; that is no news either."""
    rng, epsilons = np.random.default_rng(23), []
    for _ in range(200):
        coins = coins_of(rng, 400)
        responses = np.where(rng.random(400) < 1 / (1 + math.exp(-eps)), coins, ~coins)
        epsilons.append(
            best_epsilon_bound({"told": np.where(responses, 1.0, -1.0) * (1 + rng.random(400))}, coins, 0.0).epsilon
        )
    assert sum(f > eps for f in epsilons) <= 200 * 0.05
    assert np.median(epsilons) > 0.5 * eps or eps == 0


@pytest.mark.long
@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_of_the_gaussian_mechanism_it_is_rarely_above_the_truth(mu):
    """The release of each coin is N(+-mu / 2, 1): neighbours are mu apart."""
    truth = gaussian_mechanism.get_epsilon_gaussian(1 / mu, DELTA)
    rng, epsilons = np.random.default_rng(29), []
    for _ in range(200):
        coins = coins_of(rng, 400)
        epsilons.append(
            best_epsilon_bound(
                {"release": np.where(coins, mu / 2, -mu / 2) + rng.normal(size=400)}, coins, DELTA
            ).epsilon
        )
    assert sum(f > truth for f in epsilons) <= 200 * 0.05
    assert np.median(epsilons) > 0.05


def test_many_scores_share_the_error():
    """Ten scores of pure noise: their best would be above 0 in 40 % of the runs, were each tested by itself."""
    rng, above = np.random.default_rng(31), 0
    for _ in range(200):
        coins = coins_of(rng, 100)
        above += best_epsilon_bound({str(i): rng.normal(size=100) for i in range(10)}, coins, DELTA).epsilon > 0
    assert above <= 200 * 0.05


def test_a_mechanism_that_hides_nothing_has_a_large_bound_and_equal_scores_none():
    coins = coins_of(np.random.default_rng(1), 300)
    lower_bound = best_epsilon_bound({"blind": np.zeros(300), "plain": np.where(coins, 1.0, -1.0)}, coins, DELTA)
    assert lower_bound.score == "plain"
    assert (lower_bound.canaries, lower_bound.guesses, lower_bound.correct) == (300, 300, 300)
    assert lower_bound.epsilon > 3.5
    assert best_epsilon_bound({"blind": np.zeros(300)}, np.arange(300) % 2 == 0, DELTA).epsilon == 0.0


@pytest.mark.parametrize(
    "asked", [(5, 6, 1, 0.1, 0.1), (5, 3, 4, 0.1, 0.1), (0, 0, 0, 0.1, 0.1), (5, 5, 5, -1.0, 0.1), (5, 5, 5, 1.0, 1.1)]
)
def test_what_cannot_be_is_refused(asked):
    with pytest.raises(ValueError, match="must (satisfy|be at least)"):
        p_value(*asked)
    with pytest.raises(ValueError, match="confidence"):
        epsilon_at_least(5, 5, 5, 0.0, 1.0)


@pytest.mark.parametrize("scores", [{}, {"x": np.zeros(3)}, {"x": np.array([0.0, math.nan])}])
def test_scores_that_do_not_fit_the_coins_are_refused(scores):
    with pytest.raises(ValueError, match="each score needs 2 finite values, one per coin"):
        best_epsilon_bound(scores, np.array([True, False]), 0.0)
