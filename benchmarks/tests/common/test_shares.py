"""Exact intervals of shares, and their text."""

from __future__ import annotations

import itertools
import math

import pytest
from scipy.stats import binomtest

from fedveil_bench.common import shares
from fedveil_bench.common.verdicts import FAILS, HOLDS


def trials(successes: int, count: int) -> list[bool]:
    return [i < successes for i in range(count)]


def test_an_interval_by_hand():
    """Of n in n its lower end is the n-th root of 0.025."""
    found = shares.compute_share_interval(trials(12, 12))
    assert (found["mean"], found["high"], found["n"]) == (1.0, 1.0, 12)
    assert found["low"] == pytest.approx(0.025 ** (1 / 12))
    assert shares.compute_share_interval(trials(0, 12))["high"] == pytest.approx(1 - 0.025 ** (1 / 12))
    assert shares.compute_share_interval([True, False])["seeds"] == [1.0, 0.0]
    with pytest.raises(ValueError, match="at least one trial"):
        shares.compute_share_interval([])


@pytest.mark.parametrize(("successes", "count", "than"), [(12, 12, 0.5), (0, 12, 0.5), (8, 12, 0.25), (6, 12, 0.5)])
def test_a_word_is_as_likely_as_twice_the_smaller_tail(successes, count, than):
    tails = [binomtest(successes, count, than, side).pvalue for side in ("less", "greater")]
    for side in ("higher", "lower"):
        assert shares.judge_share(trials(successes, count), side, than).p == pytest.approx(min(1.0, 2 * min(tails)))


def test_a_word_is_of_the_side_on_which_the_share_lies():
    words = [
        shares.judge_share(trials(k, 12), side, 0.5).word for k, side in itertools.product((12, 0), ("higher", "lower"))
    ]
    assert words == [HOLDS, FAILS, FAILS, HOLDS]


def test_two_trials_have_an_interval_and_decide_nothing():
    assert shares.judge_share(trials(2, 2), "higher", 0.01).p == 1.0
    assert shares.judge_share(trials(3, 3), "higher", 0.01).p < 0.01


@pytest.mark.parametrize("count", [3, 12, 20])
@pytest.mark.parametrize("than", [0.25, 0.5])
def test_a_false_word_is_as_rare_as_its_probability_says(count, than):
    """Summed over all outcomes of trials that succeed in just that share."""
    said = [shares.judge_share(trials(k, count), "higher", than) for k in range(count + 1)]
    chances = [math.comb(count, k) * than**k * (1 - than) ** (count - k) for k in range(count + 1)]
    for alpha in (0.05, 0.2):
        assert sum(c for c, each in zip(chances, said, strict=True) if each.p <= alpha) <= alpha + 1e-9
