"""LiRA: the pool's split among shadows, phi, and the likelihood ratio by hand and on data with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.attacks.membership.lira import POOLED_BELOW, lira_scores, target_confidence, train_shadows
from fedveil.attacks.statistics import area_under_roc, rank_test


def normal_log(x: float, mean: float, std: float) -> float:
    return -0.5 * math.log(2 * math.pi) - math.log(std) - 0.5 * ((x - mean) / std) ** 2


def phi(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


# --- shadows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool,count", [(10, 6), (7, 4), (2, 2), (33, 32)])
def test_each_row_is_in_half_of_the_shadows_and_pairs_share_the_pool_out(pool, count):
    asked = []

    def train(indices, number):
        asked.append((number, indices))
        return {"number": number}

    shadows = train_shadows(train, pool, count, np.random.default_rng(0))
    assert shadows.members.shape == (count, pool)
    assert (shadows.members.sum(0) == count // 2).all()
    for first in range(0, count, 2):
        assert (shadows.members[first] ^ shadows.members[first + 1]).all()
        assert shadows.members[first].sum() == pool // 2
    assert [number for number, _ in asked] == list(range(count))
    for number, indices in asked:
        assert all(type(i) is int for i in indices)
        assert indices == np.flatnonzero(shadows.members[number]).tolist()
    assert list(shadows.weights) == [{"number": number} for number in range(count)]


def test_halves_are_drawn_anew_and_repeat_with_the_generator():
    draw = lambda seed: train_shadows(lambda i, n: {}, 20, 8, np.random.default_rng(seed)).members  # noqa: E731
    assert (draw(1) == draw(1)).all()
    assert (draw(1) != draw(2)).any()
    assert len({tuple(row) for row in draw(1)}) == 8


@pytest.mark.parametrize("pool,count", [(10, 0), (10, 1), (10, 3), (10, -2), (1, 2), (0, 2)])
def test_what_cannot_be_shared_out_is_refused(pool, count):
    with pytest.raises(ValueError, match="the number of shadows must be even"):
        train_shadows(lambda i, n: {}, pool, count, np.random.default_rng(0))


# --- phi --------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 20.0))
def test_confidence_is_the_log_odds(loss):
    p = math.exp(-loss)
    assert target_confidence(np.array([loss]))[0] == pytest.approx(math.log(p / -math.expm1(-loss)), abs=1e-9)


def test_confidence_by_hand():
    np.testing.assert_allclose(
        target_confidence(np.array([math.log(2), math.log(4)])), [0.0, math.log(1 / 3)], atol=1e-12
    )


def test_confidence_is_finite_and_ordered_at_both_ends():
    losses = np.array([0.0, 1e-13, 1e-9, 1e-3, 1.0, 50.0, 1e4])
    confidences = target_confidence(losses)
    assert np.isfinite(confidences).all()
    assert (np.diff(confidences[1:]) < 0).all()
    assert confidences[0] >= confidences[1]
    assert confidences[2] == pytest.approx(9 * math.log(10), abs=1e-6)  # near 0: -ln(loss)
    assert confidences[-1] == -1e4  # far off: -loss


# --- the ratio --------------------------------------------------------------------------------------------------------

# Four shadows, three rows. Two shadows have rows 0 and 1; none has row 2.
SHADOWS = np.array([[3.0, 1.0, 0.0], [5.0, -1.0, 2.0], [0.0, -2.0, 1.0], [2.0, -4.0, 1.0]])
MEMBERS = np.array([[True, True, False], [True, False, False], [False, True, False], [False, False, False]])


def test_online_ratio_by_hand_with_one_variance():
    """Each side's squares over its degrees of freedom, all rows together.

    in: means 4 and -0.5; squares 1 + 1 and 2.25 + 2.25; degrees 1 + 1: s^2 = 6.5 / 2
    out: means 1, -2.5 and 1; squares 2, 4.5 and 1 + 1 + 0 + 0; degrees 1 + 1 + 3: s^2 = 8.5 / 5
    """
    target = np.array([3.5, -3.0, 2.0])
    scores = lira_scores(target, SHADOWS, MEMBERS)
    s_in, s_out = math.sqrt(6.5 / 2), math.sqrt(8.5 / 5)
    assert scores[0] == pytest.approx(normal_log(3.5, 4.0, s_in) - normal_log(3.5, 1.0, s_out))
    assert scores[1] == pytest.approx(normal_log(-3.0, -0.5, s_in) - normal_log(-3.0, -2.5, s_out))
    assert scores[2] == pytest.approx(math.log(phi((2.0 - 1.0) / s_out)))  # offline: no shadow had it


def test_a_row_that_every_shadow_had_is_judged_against_them():
    scores = lira_scores(np.array([3.5, -3.0, 2.0]), SHADOWS, ~MEMBERS)
    assert scores[2] == pytest.approx(math.log(phi((2.0 - 1.0) / math.sqrt(8.5 / 5))))


def test_sixteen_shadows_a_side_give_a_row_its_own_variance():
    rng = np.random.default_rng(0)
    members = np.zeros((2 * POOLED_BELOW, 2), dtype=bool)
    members[::2] = True
    shadows = rng.normal([0.0, 5.0], [1.0, 10.0], (2 * POOLED_BELOW, 2))
    target = np.array([0.3, 2.0])
    scores = lira_scores(target, shadows, members)
    for row in range(2):
        mine, other = shadows[members[:, row], row], shadows[~members[:, row], row]
        expected = normal_log(target[row], mine.mean(), mine.std(ddof=1))
        expected -= normal_log(target[row], other.mean(), other.std(ddof=1))
        assert scores[row] == pytest.approx(expected)


def test_a_row_with_few_shadows_takes_the_pooled_variance_beside_rows_with_many():
    """One shadow had it: its own deviation would be zero, and any distance from it a million."""
    rng = np.random.default_rng(1)
    members = np.zeros((40, 3), dtype=bool)
    members[:20, :2] = True
    members[0, 2] = True
    shadows = rng.normal(size=(40, 3))
    scores = lira_scores(np.array([0.0, 0.0, shadows[0, 2] + 1.0]), shadows, members)
    assert np.abs(scores).max() < 20


@pytest.mark.parametrize("extreme", [1e5, -1e5, 0.0])
@pytest.mark.parametrize("count", [4, 40])
def test_extreme_values_give_numbers(extreme, count):
    """Also for shadows that agree to the bit, and for rows of one side only."""
    rng = np.random.default_rng(2)
    members = np.zeros((count, 4), dtype=bool)
    members[::2, :2] = True
    members[:, 3] = True  # row 2 in none, row 3 in all
    for shadows in (rng.normal(size=(count, 4)), np.zeros((count, 4))):
        scores = lira_scores(np.full(4, extreme), shadows, members)
        assert np.isfinite(scores).all()
    losses = np.array([0.0, 1e-13, 1e3, 1e4])
    assert np.isfinite(
        lira_scores(target_confidence(losses), target_confidence(np.tile(losses, (count, 1))), members)
    ).all()


def test_the_offline_score_still_orders_rows_far_below():
    """ln Phi beyond what Phi can hold: falling all the way, without a jump where the asymptote takes over."""
    far = -np.concatenate(
        [np.linspace(0, 29, 30), np.linspace(29.9, 30.1, 21), np.array([35.0, 38.0, 39.5, 50.0, 1e3, 1e5])]
    )
    shadows = np.tile(np.array([[1.0], [-1.0]]) / math.sqrt(2), (1, len(far)))  # mean 0, deviation 1
    scores = lira_scores(far, shadows, np.zeros_like(shadows, dtype=bool))
    assert np.isfinite(scores).all()
    assert (np.diff(scores) < 0).all()
    steps = np.diff(scores[30:51])
    assert (np.abs(steps - np.median(steps)) < 0.01).all()
    assert scores[0] == pytest.approx(math.log(0.5))


def test_a_row_without_any_shadow_is_an_error():
    with pytest.raises(ValueError, match="no shadow has scored one of the examples"):
        lira_scores(np.zeros(2), np.zeros((0, 2)), np.zeros((0, 2), dtype=bool))


def test_more_confident_than_the_others_scores_higher():
    shadows = np.array([[2.0], [2.2], [0.0], [0.2]])
    members = np.array([[True], [True], [False], [False]])
    assert lira_scores(np.array([2.1]), shadows, members)[0] > 0 > lira_scores(np.array([0.1]), shadows, members)[0]


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("online", [True, False])
def test_beats_the_plain_loss_where_rows_differ_in_difficulty(online, count):
    """phi = the row's own level (deviation 5) + 1.5 for a member + noise of 1: it drowns the loss, not the ratio."""
    rng = np.random.default_rng(3)
    rows = 400
    level = rng.normal(0, 5, rows)
    members = np.zeros((count, rows), dtype=bool)
    if online:
        members = train_shadows(lambda i, n: {}, rows, count, rng).members
    shadows = level + 1.5 * members + rng.normal(size=(count, rows))
    truth = np.arange(rows) < rows // 2
    target = level + 1.5 * truth + rng.normal(size=rows)
    ratio, plain = lira_scores(target, shadows, members), target
    assert area_under_roc(ratio[truth], ratio[~truth]) > 0.75
    assert area_under_roc(plain[truth], plain[~truth]) < 0.65


@pytest.mark.parametrize(("other", "fails"), [(False, False), (True, True)])
def test_its_control_to_lose_fails_where_non_members_are_of_another_distribution(other, fails):
    """Shadows learn rows of the members' source without having them, and rows with drawn labels by heart alone."""
    rng = np.random.default_rng(12)
    had = np.zeros((16, 120), dtype=bool)
    for first in range(0, 16, 2):
        had[first] = rng.permutation(120) < 60
        had[first + 1] = ~had[first]
    without = np.where((np.arange(120) >= 60) & other, -2.0, 1.5)  # phi of a shadow that did not have the row
    shadows = np.where(had, 2.0, without) + 0.5 * rng.standard_normal(had.shape)
    untrained = 0.3 * rng.standard_normal(120)
    scores = lira_scores(untrained, shadows, had)
    is_significant = abs(rank_test(scores[:60], scores[60:])) > 1.96
    assert is_significant == fails
