"""Warnings about settings with almost no privacy, tested at their limits."""

from __future__ import annotations

import math

import pytest

from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.privacy_warnings import delta_warnings, noise_warnings, privacy_warnings


@pytest.mark.parametrize("neighbours", list(Adjacency))
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_noise_is_warned_of_exactly_where_one_use_has_an_epsilon_above_100(neighbours, delta):
    budget = PrivacyBudget(math.inf, delta, neighbours)
    low, high = 1e-3, 10.0
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if noise_warnings([middle], budget) else (low, middle)
    epsilon = accounting.compute_epsilon({Step("gaussian", 0, 0, high): 1}, delta, neighbours)
    assert epsilon == pytest.approx(100, rel=1e-4)
    assert noise_warnings([0.0, 5.0], budget)
    assert noise_warnings([1e-300], budget)
    assert not noise_warnings([], budget)


def test_delta_is_warned_of_from_a_hundredth_and_above_one_over_the_examples():
    assert "at least 0.01" in delta_warnings(0.01)[0]
    assert delta_warnings(0.0099) == []
    assert delta_warnings(1e-3, [1000]) == []
    assert "above 1 / 1,001" in delta_warnings(1e-3, [10, 1001])[0]


def test_a_run_without_a_guarantee_has_no_warning():
    assert privacy_warnings(None, [100]) == []
    assert privacy_warnings(DpSgdConfig(1.0, 1.0, 0.1), [100]) == []
    assert len(privacy_warnings(DpSgdConfig(1.0, 1e-9, 0.1, delta=0.5), [100])) == 2
