"""mu of Gaussian differential privacy: exact for Gaussian steps, otherwise a bound on the accountant's whole curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from fedveil.contract.privacy import OWN_SHARE, SUMMED, Adjacency, Step
from fedveil.privacy.gdp import compute_mu

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
STEPS = {Step("poisson", 1000, 50, 1.5): 40}


def delta_of(value: float, epsilon: float) -> float:
    return float(norm.cdf(value / 2 - epsilon / value) - math.exp(epsilon) * norm.cdf(-value / 2 - epsilon / value))


def test_mu_of_gaussian_steps_is_the_root_of_their_sum():
    """4 steps of z = 5 and 9 of z = 3: 4 / 25 + 9 / 9 = 1.16."""
    charges = {Step("gaussian", 0, 0, 5.0): 4, Step("gaussian", 0, 0, 3.0): 9, Step("gaussian", 0, 0, 1.0): 0}
    assert compute_mu(charges, 1e-5, ZERO).value == pytest.approx(math.sqrt(1.16))
    assert compute_mu(charges, 1e-5, REPLACE).value == pytest.approx(2 * math.sqrt(1.16))
    assert compute_mu(charges, 1e-5, ZERO).down_to == 0


@pytest.mark.long
@pytest.mark.parametrize("neighbours", [ZERO, REPLACE])
def test_mu_of_subsampled_steps_bounds_the_whole_curve_and_not_much_more(neighbours):
    mu_bound = compute_mu(STEPS, 1e-5, neighbours)
    relation = NeighboringRelation.REPLACE_ONE if neighbours is REPLACE else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation)
    for step, count in STEPS.items():
        gaussian = GaussianDpEvent(step.multiplier)
        accountant.compose(
            gaussian if not step.batch else PoissonSampledDpEvent(step.batch / step.examples, gaussian), count
        )
    assert mu_bound.down_to == pytest.approx(1e-7)
    within = np.random.default_rng(7).uniform(0, accountant.get_epsilon(mu_bound.down_to), 40)
    true = [accountant.get_delta(float(epsilon)) for epsilon in within]
    assert all(delta_of(mu_bound.value, e) >= t for e, t in zip(within, true, strict=True))
    assert not all(delta_of(0.97 * mu_bound.value, e) >= t for e, t in zip(within, true, strict=True))


@pytest.mark.parametrize(
    "charges",
    [
        {},
        {Step("gaussian", 0, 0, 0.0): 3},
        {Step("fixed", 100, 10, 2.0): 3},
        {Step(SUMMED, 100, 10, 2.0): 3, Step(OWN_SHARE, 100, 10, 1.0): 3},
        {Step("gaussian", 0, 0, 2.0): 1, Step(SUMMED, 0, 0, 2.0): 1},
    ],
)
def test_no_mu_is_stated_where_none_is_known(charges):
    assert compute_mu(charges, 1e-5, REPLACE) is None
