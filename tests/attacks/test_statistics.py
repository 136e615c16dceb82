"""Against values by hand, published ones and naive twins. Statistical tests fix their seed and state their level."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedveil.attacks import statistics
from fedveil.attacks.statistics import (
    area_under_roc,
    areas_under_roc,
    bootstrap_interval,
    clopper_pearson,
    epsilon_lower_bound,
    holm_correction,
    rank_test,
    tpr_at_fpr,
    tprs_at_fpr,
    two_sided,
)
from tests.attacks.standard_error import hanley_mcneil

FEW = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=15)  # few values, so that ties are common


def scores(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def test_auroc_by_hand():
    """Pairs (3, 1) (3, 2) (2, 1) won, (2, 2) a tie: 3.5 of 4. The wrong way round: 0.5 of 4, and not flipped."""
    assert area_under_roc(scores(3, 2), scores(1, 2)) == 3.5 / 4
    assert area_under_roc(scores(1, 2), scores(3, 2)) == 0.5 / 4
    assert area_under_roc(scores(7), scores(7)) == 0.5
    assert area_under_roc(scores(math.inf, 0), scores(-math.inf, 0)) == 3.5 / 4


@given(FEW, FEW)
@settings(deadline=None)
def test_auroc_equals_its_naive_twin(members, others):
    pairs = [1.0 if m > o else 0.5 if m == o else 0.0 for m in members for o in others]
    assert area_under_roc(scores(*members), scores(*others)) == pytest.approx(np.mean(pairs), abs=1e-12)


@given(FEW, FEW, st.floats(0, 1))
@settings(deadline=None)
def test_tpr_equals_its_naive_twin(members, others, fpr):
    """The best of all thresholds among the non-members' scores, and "nobody above", that keep the false positives."""
    allowed = math.floor(fpr * len(others) + 1e-9)
    best = max(np.mean([m > t for m in members]) for t in [*others, -math.inf] if sum(o > t for o in others) <= allowed)
    tpr = tpr_at_fpr(scores(*members), scores(*others), fpr)
    assert tpr == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    "fpr,expected",
    [(0.0, 0.25), (0.19, 0.25), (0.2, 0.5), (0.4, 0.75), (1.0, 1.0)],
)
def test_tpr_by_hand(fpr, expected):
    """Five non-members 1 to 5: one may be exceeded from 20 % on. The member at 5 is a tie at 0 % and counts nowhere."""
    assert tpr_at_fpr(scores(6, 5, 4, 1), scores(1, 2, 3, 4, 5), fpr) == expected


def test_tpr_with_too_few_non_members_lets_none_exceed():
    """0.1 % of 300: below one row, so the threshold is the highest non-member."""
    others = np.arange(300.0)
    assert tpr_at_fpr(scores(299, 299.5), others, 0.001) == 0.5


@pytest.mark.parametrize("fpr", [-0.01, 1.01])
def test_no_rate(fpr):
    with pytest.raises(ValueError, match="fpr: expected a rate from 0 to 1"):
        tpr_at_fpr(scores(1), scores(1), fpr)


@pytest.mark.parametrize("statistic", [area_under_roc, lambda m, n: tpr_at_fpr(m, n, 0.1)])
@pytest.mark.parametrize("members,others", [([], [1.0]), ([1.0], []), ([math.nan], [1.0]), ([1.0], [math.nan])])
def test_empty_sides_and_nan_are_refused(statistic, members, others):
    with pytest.raises(ValueError, match="scores"):
        statistic(scores(*members), scores(*others))


@pytest.mark.long
def test_bootstrap_interval_has_its_level():
    """Null data: 200 intervals of 95 % hold 0.5 in 190 +- 3.1 cases; 4.5 sigma below would be 176."""
    rng = np.random.default_rng(31415)
    num_covering = 0
    for _ in range(200):
        interval = bootstrap_interval(areas_under_roc, rng.normal(size=60), rng.normal(size=80), rng, 200)
        num_covering += interval.low <= 0.5 <= interval.high
    assert 176 <= num_covering < 200


def test_bootstrap_is_repeatable_and_brackets_its_value():
    rng = np.random.default_rng(1)
    members, others = rng.normal(0.5, 1, 150), rng.normal(0, 1, 100)
    one, two = (bootstrap_interval(areas_under_roc, members, others, np.random.default_rng(7)) for _ in range(2))
    assert one == two
    assert one.low < one.value == area_under_roc(members, others) < one.high
    assert (one.high - one.low) / (2 * 1.96) == pytest.approx(hanley_mcneil(one.value, 150, 100), rel=0.15)


@pytest.mark.parametrize("ties", [False, True])
def test_statistics_of_draws_are_those_of_each_draw(ties):
    rng = np.random.default_rng(9)
    members, others = rng.normal(0.4, 1, (30, 17)), rng.normal(0, 1, (30, 23))
    if ties:
        members, others = members.round(), others.round()
    pairs = list(zip(members, others, strict=True))
    assert areas_under_roc(members, others).tolist() == [area_under_roc(m, o) for m, o in pairs]
    for fpr in (0.0, 0.001, 0.1, 1.0):
        assert tprs_at_fpr(members, others, fpr).tolist() == [tpr_at_fpr(m, o, fpr) for m, o in pairs]


def test_the_interval_does_not_depend_on_how_many_resamples_are_held_at_a_time(monkeypatch):
    """And it is that of resamples one by one, in the order of the draws."""
    rng = np.random.default_rng(3)
    members, others = rng.normal(0.5, 1, 40), rng.normal(0, 1, 30)
    whole = bootstrap_interval(areas_under_roc, members, others, np.random.default_rng(5), 100)
    monkeypatch.setattr(statistics, "_MOST_DRAWN", 7 * 70)
    assert bootstrap_interval(areas_under_roc, members, others, np.random.default_rng(5), 100) == whole
    again = np.random.default_rng(5)
    drawn = [area_under_roc(again.choice(members, 40), again.choice(others, 30)) for _ in range(100)]
    assert (whole.low, whole.high) == tuple(np.quantile(drawn, (0.025, 0.975)))


def test_bootstrap_resamples_each_side_from_itself():
    """One member above, one non-member below: every resample says 1; a mixed one would not."""
    interval = bootstrap_interval(areas_under_roc, scores(2, 2), scores(1, 1, 1), np.random.default_rng(0), 50)
    assert (interval.value, interval.low, interval.high) == (1, 1, 1)


@pytest.mark.long
def test_two_thousand_rows_and_a_thousand_resamples_take_seconds_not_minutes():
    """0.3 s on two slow cores; a quadratic AUROC would take about a minute. Likewise the bound, 0.6 s there."""
    rng = np.random.default_rng(0)
    members, others = rng.normal(1, 1, 2000), rng.normal(0, 1, 2000)
    started = time.process_time()
    bootstrap_interval(areas_under_roc, members, others, rng)
    epsilon_lower_bound(members, others, 1e-5, rng)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("levels", [1000, 4])
def test_the_rank_test_without_labels_is_that_of_mann_and_whitney(levels):
    """scipy's, with ties and without its correction for continuity."""
    rng = np.random.default_rng(levels)
    members, others = (
        rng.integers(0, levels, 30).astype(float) + 0.2 * levels,
        rng.integers(0, levels, 50).astype(float),
    )
    expected = stats.mannwhitneyu(members, others, method="asymptotic", use_continuity=False)
    assert two_sided(rank_test(members, others)) == pytest.approx(expected.pvalue, rel=1e-9)
    assert rank_test(members, others) == -rank_test(others, members) > 0


def test_the_rank_test_within_labels_by_hand():
    """Label a: 1 of 2 pairs won, b: 4 of 4. Weights 2/4 and 4/5; variances (N + 1) / (12 m n): 1/6 and 5/48."""
    z = rank_test(scores(2, 9, 8), scores(1, 3, 7, 6), list("abb"), list("aabb"))
    assert z == pytest.approx((0.8 * 0.5) / (0.25 / 6 + 0.64 * 5 / 48) ** 0.5)
    assert rank_test(scores(1, 2), scores(3, 4), list("ab"), list("cd")) == 0  # no label on both sides
    assert rank_test(scores(1, 1), scores(1, 1)) == 0


def test_the_rank_test_keeps_its_level_where_labels_score_apart_and_lie_unequally():
    """Most members have the label with few non-members: centring on so few would tell these sides apart too often."""
    rng, wrong = np.random.default_rng(8), 0
    mine, theirs = ["a"] * 40 + ["b"] * 3, ["a"] * 3 + ["b"] * 60
    for _ in range(1000):
        sides = [rng.normal(size=len(of)) + 3.0 * (np.array(of) == "b") for of in (mine, theirs)]
        wrong += two_sided(rank_test(*sides, mine, theirs)) <= 0.05
    assert 25 <= wrong <= 70  # 50 +- 3 sigma


def test_holm_by_hand():
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.5, 0.9]) == [1.0, 1.0]
    assert holm_correction([]) == []


def test_clopper_pearson_published_values():
    """5 of 10: 0.1871 to 0.8129 (tables of Clopper and Pearson); 0 of n and n of n in closed form."""
    low, high = clopper_pearson(5, 10)
    assert (round(low, 4), round(high, 4)) == (0.1871, 0.8129)
    assert [round(b, 4) for b in clopper_pearson(1, 20)] == [0.0013, 0.2487]
    for n in (1, 7, 1000):
        closed = 1 - 0.025 ** (1 / n)
        assert clopper_pearson(0, n) == pytest.approx((0, closed), abs=1e-9)
        assert clopper_pearson(n, n) == pytest.approx((1 - closed, 1), abs=1e-9)


@given(st.integers(1, 60), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
@settings(deadline=None, max_examples=40)
def test_clopper_pearson_bounds_leave_the_tails(trials, data, confidence):
    """By an exact sum with integers: P(X >= k; low) and P(X <= k; high) are each half the error."""
    k = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(k, trials, confidence)
    half = (1 - confidence) / 2

    def mass(p: float, counts: range) -> float:
        return math.fsum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in counts)

    assert 0 <= low <= k / trials <= high <= 1
    assert low == 0 if k == 0 else mass(low, range(k, trials + 1)) == pytest.approx(half, abs=1e-8)
    assert high == 1 if k == trials else mass(high, range(k + 1)) == pytest.approx(half, abs=1e-8)


@pytest.mark.parametrize("successes,trials", [(-1, 5), (6, 5), (0, 0)])
def test_clopper_pearson_of_no_binomial(successes, trials):
    with pytest.raises(ValueError, match="are impossible in"):
        clopper_pearson(successes, trials)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_epsilon_bound_on_randomised_response(epsilon):
    """A bit told truthfully with probability e^eps / (1 + e^eps) is exactly (eps, 0)-private.

    100 bounds of 95 %: at most 5 +- 2.2 may be above eps; 15 is 4.5 sigma. They are of use: the mean is above 0.45
    of it.
    """
    rng = np.random.default_rng(271828)
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    bounds = [
        epsilon_lower_bound((rng.random(600) < truth).astype(float), (rng.random(600) >= truth).astype(float), 0.0, rng)
        for _ in range(100)
    ]
    assert sum(bound > epsilon for bound in bounds) <= 15
    assert 0.45 * epsilon < np.mean(bounds) < epsilon


def test_epsilon_bound_of_nothing_is_zero_and_of_everything_is_what_the_rows_allow():
    rng = np.random.default_rng(3)
    assert epsilon_lower_bound(rng.normal(size=400), rng.normal(size=400), 1e-5, rng) < 0.3
    assert epsilon_lower_bound(scores(1), scores(0), 0.0, rng) == 0
    told_apart = epsilon_lower_bound(np.ones(200), np.zeros(200), 0.0, rng)
    none_of_200 = 1 - (0.05 / 3 / 2) ** (1 / 200)  # a third of the error at the first rank, half of it for either rate
    assert told_apart == pytest.approx(math.log((1 - none_of_200) / none_of_200), abs=1e-6)
    assert epsilon_lower_bound(np.ones(200), np.zeros(200), 0.99, rng) == 0  # delta explains it


def test_the_epsilon_bound_equals_its_naive_twin():
    """Every rank by comparison of all pairs, and scipy's quantiles of the beta distribution."""
    rng = np.random.default_rng(5)
    for mu, size in ((0.5, 40), (1.0, 90), (3.0, 130)):
        members, others = rng.normal(mu, 1, size), rng.normal(0, 1, size + 11)
        best, ranks = 0.0, [rank for rank in (1, 3, 9, 27, 81, 243) if rank <= len(others)]
        for rank in ranks:
            threshold = next(s for s in others if (others >= s).sum() == rank)
            error = 0.05 * (1 / 3 if rank == 1 else 2 / 3 / (len(ranks) - 1)) / 2
            found = sum(m > threshold for m in members)
            low = stats.beta.ppf(error, found, size - found + 1) if found else 0.0
            high = stats.beta.ppf(1 - error, rank, len(others) - rank + 1)
            best = max(best, math.log((low - 1e-5) / high) if low > 1e-5 else 0.0)
        assert epsilon_lower_bound(members, others, 1e-5, rng) == pytest.approx(best, abs=1e-6)


def test_the_epsilon_bound_needs_memory_for_the_scores_alone():
    """A comparison of all pairs of 20,000 scores is 400 MB of booleans."""
    rng = np.random.default_rng(6)
    members, others = rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000)
    tracemalloc.start()
    assert epsilon_lower_bound(members, others, 1e-5, rng) > 1.5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.long
def test_no_bound_of_300_draws_is_above_the_truth():
    """Scores of a Gaussian mechanism with mu = 1: its exact epsilon at 1e-5 is 4.38. At 500 rows a side the mean, 1.10,
    is above that of Bonferroni's correction over all thresholds of the ROC's hull: 1.04 on the same draws.
    """
    rng = np.random.default_rng(7)
    cdf = stats.norm.cdf
    truth = optimize.brentq(lambda e: cdf(0.5 - e) - math.exp(e) * cdf(-0.5 - e) - 1e-5, 0, 20)
    bounds = [epsilon_lower_bound(rng.normal(1, 1, 500), rng.normal(0, 1, 500), 1e-5, rng) for _ in range(300)]
    assert max(bounds) <= truth
    assert np.mean(bounds) > 1.04


def test_the_best_of_all_ranks_keeps_the_level():
    """Members and non-members alike: without the correction for the ranks, bounds would be above 0 far too often."""
    rng = np.random.default_rng(11)
    positive = sum(epsilon_lower_bound(rng.normal(size=40), rng.normal(size=40), 0.0, rng, 0.5) > 0 for _ in range(200))
    assert positive <= 125  # level 0.5: 100 + 3.5 sigma


def test_counts_are_cached_by_value():
    clopper_pearson.cache_clear()
    clopper_pearson(3, 9)
    clopper_pearson(3, 9)
    assert clopper_pearson.cache_info().hits == 1
    assert statistics._log_choose(4) == pytest.approx(np.log([1, 4, 6, 4, 1]))
