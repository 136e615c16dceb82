"""Noise in a sum: its epsilon, its uses, and refusals."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import strategies
from fedveil.config import parse
from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OLD_SUMMED,
    OWN_SHARE,
    SUMMED,
    Adjacency,
    PrivacyBudget,
    SamplingPlan,
    Step,
    legacy_step,
)
from fedveil.errors import BudgetError, ConfigError
from fedveil.privacy import accounting, discrete_gaussian, distributed_dgauss
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.privacy.ledger_account import Party, RunTerms
from fedveil.privacy.server_side_bound import promised_epsilon
from tests.fedveil.privacy.normal_tail import normal_tail

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
DP = {
    "dp.clip-norm": 2.0,
    "dp.noise-multiplier": 1.25,
    "dp.learning-rate": 0.5,
    "train.max-steps": 1,
    "train.batch-size": 8,
}
SUM = {"secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 5}
FPL = "noise_local = 3.0\nnoise_global = 4.0\nclip_global = 2.5"


def claimed(name: str = "fedavg", fields: str = "", **changes) -> DistributedDiscreteGaussian:
    flat = {} if name == "dp_fpl" else DP
    config = parse(flat | SUM | {key.replace("__", ".").replace("_", "-"): v for key, v in changes.items()})
    claim = guarantee_of(strategies.create_method(name, fields), config)
    assert isinstance(claim, DistributedDiscreteGaussian)
    return claim


@pytest.mark.parametrize("sites,z", [(1, 3.80), (3, 2.68), (10, 1.43), (30, 0.85), (100, 0.46)])
def test_the_noise_a_site_by_the_exact_gaussian_for_an_epsilon_of_8(sites, z):
    """T = 10 releases, delta 1e-5, replace-one, two thirds of the sites honest (rounded up)."""
    honest = math.ceil(2 * sites / 3)
    alone = accounting.noise_multiplier_for(lambda z: {Step("gaussian", 0, 0, z): 10}, 8.0, 1e-5, REPLACE)
    assert alone / math.sqrt(honest) == pytest.approx(z, abs=0.006)


def test_integer_noise_takes_as_much_as_the_exact_gaussian_and_six_per_cent_more_if_it_is_coarse():
    exact, fine, coarse = (
        accounting.noise_multiplier_for(lambda z, s=step: {s._replace(multiplier=z): 10}, 8.0, 1e-5, REPLACE)
        for step in (Step("gaussian", 0, 0, 1.0), Step(SUMMED, 0, 0, 1.0), Step(SUMMED, 0, 0, 1.0, 1.0))
    )
    assert 0.999 < fine / exact < 1.002
    assert 1.05 < coarse / exact < 1.07


@pytest.mark.parametrize("neighbours,moved", [(ZERO, 1), (REPLACE, 2)])
@pytest.mark.parametrize("z,count", [(3.14159, 7), (0.9, 1)])
def test_with_all_sites_honest_epsilon_is_that_of_one_noise_at_the_centre(neighbours, moved, z, count):
    """dp-accounting's own, on a Gaussian of that multiplier; never below the exact value."""
    central = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    central.compose(dp_accounting.GaussianDpEvent(z / moved), count)
    epsilon = accounting.compute_epsilon({Step(SUMMED, 0, 0, z, 1.0): count}, 1e-5, neighbours)
    assert epsilon == pytest.approx(central.get_epsilon(1e-5), rel=1e-6)
    assert epsilon > accounting.compute_epsilon({Step("gaussian", 0, 0, z): count}, 1e-5, neighbours)


def weights(shift: int, sigma: float) -> np.ndarray:
    """Logarithms of them."""
    log_weights = -(((np.arange(-600, 601) - shift) / sigma) ** 2) / 2
    return log_weights - np.logaddexp.reduce(log_weights)


def divergence(p: np.ndarray, q: np.ndarray, order: int) -> float:
    return float(np.logaddexp.reduce(order * p + (1 - order) * q)) / (order - 1)


@pytest.mark.parametrize("order", [2, 3, 7])
@pytest.mark.parametrize("rate,shift,sigma", [(0.1, 3, 4.5), (0.5, 2, 4.0)])
def test_a_subsampled_sum_of_integers_has_the_divergence_that_is_counted(order, rate, shift, sigma):
    """Against the weights themselves: equal when a row comes, no more when it goes, no more when it is replaced."""
    without, with_it, other = (weights(s, sigma) for s in (0, shift, -shift))
    drawn, replaced = (np.logaddexp(math.log(1 - rate) + without, math.log(rate) + w) for w in (with_it, other))
    step = (Step(SUMMED, 1000, int(1000 * rate), sigma / shift), 1)
    (counted,) = accounting._drawn([step], np.array([float(order)]))
    assert divergence(drawn, without, order) == pytest.approx(counted, rel=1e-9)
    assert divergence(without, drawn, order) <= counted * (1 + 1e-9)
    twice, once = accounting._drawn([step], np.array([2.0 * order, 2.0 * order - 1]))
    assert divergence(drawn, replaced, order) <= (order - 0.5) / (order - 1) * twice + once


@pytest.mark.parametrize(
    "z, batch, rows, steps, rounded, figure",
    [  # rounding as coarse as is usual, or so coarse that it doubles the noise: sqrt d = P S / 31.5, or 2 P S
        (1.5, 10, 100, 50, 1 / 31.5, 4.2406),
        (1.5, 10, 100, 50, 2.0, 7.1855),
        (8.0, 30, 60, 100, 1 / 31.5, 5.7706),
        (8.0, 30, 60, 100, 2.0, 9.1866),
        (3.0, 100, 1000, 300, 1 / 31.5, 5.2475),
        (3.0, 100, 1000, 300, 2.0, 8.3270),
        (2.0, 8, 57, 30, 1 / 31.5, 3.3098),
        (2.0, 8, 57, 30, 2.0, 5.3156),
    ],
)
def test_a_sampled_sum_costs_the_distance_of_a_record_from_none(z, batch, rows, steps, rounded, figure):
    """The noise is z times half the distance of two records, (2 P S + sqrt d) / 2, as ledgers before 4 had it."""
    of_one = z * (2 + rounded) / 2 / (1 + rounded)
    epsilon = accounting.compute_epsilon({Step(SUMMED, rows, batch, of_one, 1e-15): steps}, 1e-5, REPLACE)
    assert figure * (1 - 1e-4) <= epsilon <= figure * 1.002


@pytest.mark.parametrize("neighbours", list(Adjacency))
def test_a_sum_costs_a_little_more_than_the_continuous_step_and_far_less_than_by_renyi(neighbours):
    continuous = accounting.compute_epsilon({Step("poisson", 400, 8, 2.0): 50}, 1e-5, neighbours)
    fine = accounting.compute_epsilon({Step(SUMMED, 400, 8, 2.0, 1e-14): 50}, 1e-5, neighbours)
    coarse = accounting.compute_epsilon({Step(SUMMED, 400, 8, 2.0, 1.0): 50}, 1e-5, neighbours)
    assert continuous < fine < continuous * 1.002
    assert coarse > fine * 1.05
    assert coarse < accounting.compute_epsilon({Step(SUMMED, 0, 0, 2.0): 50}, 1e-5, neighbours) / 3


def test_the_distance_from_the_continuous_mechanism_is_paid_from_delta_or_renyi_counts():
    """(1 + e^epsilon) V may take 2^-10 of delta."""
    step = Step(SUMMED, 0, 0, 2.0)
    at = lambda variation: accounting.compute_epsilon({step._replace(variation=variation): 3}, 1e-5, ZERO)  # noqa: E731
    exact = accounting.compute_epsilon({Step("gaussian", 0, 0, 2.0): 3}, 1e-5 * (1 - 2**-10), ZERO)
    most = 1e-5 * 2**-10 / (1 + math.exp(exact)) / 3
    assert at(0.0) == pytest.approx(exact, rel=1e-9)
    assert at(most * 0.999) == pytest.approx(exact, rel=1e-9)
    assert at(most * 1.001) > exact * 1.05
    for variation, name in ((most * 0.999, "privacy loss distributions"), (most * 1.001, "Renyi divergences")):
        charges = {step._replace(variation=variation): 3, Step(OWN_SHARE, 0, 0, 1.0, 1.0): 3}
        assert accounting.name_sum_accountant(charges, 1e-5, ZERO) == name
    assert accounting.name_sum_accountant({Step(OLD_SUMMED, 0, 0, 2.0): 1}, 1e-5, ZERO) == "Renyi divergences"
    assert accounting.name_sum_accountant({Step("poisson", 9, 3, 2.0): 1}, 1e-5, ZERO) == ""


@pytest.mark.parametrize(
    "entries, epsilon, sites, rounds", [(10**7, 8.0, 2, 50), (10**6, 2.0, 5, 20), (100, 8.0, 3, 10)]
)
def test_the_scale_is_so_fine_that_the_distance_fits_into_the_claim(entries, epsilon, sites, rounds):
    changes = {"dp__epsilon": epsilon, "secure__min_sites": sites + 1, "run__rounds": rounds}
    claim = claimed(**changes)
    scale = claim.scale(entries, 1.0, 2.0**62)
    variation, own = claim.at_scale(scale, entries, 1.0).variations
    alone = claim.deviation(scale, entries, 1.0)
    distances = [math.sqrt(entries) * 9e-4 / (n * alone**2) ** 2 for n in (sites, 1)]
    assert distances[0] <= variation <= 1e-5 / 16 * 2**-10 / (1 + math.exp(epsilon)) / rounds
    assert own == (variation if distances[1] < variation else 1.0)
    assert claim.as_planned().variations == (variation, 1.0)
    assert claim.at_scale(scale / 1000, entries, 1.0).variations == (1.0, 1.0)


def test_coarse_sums_of_a_tight_ring_are_not_continuous():
    """Two sites with a sigma of 4 each and 1e6 entries are a distance of 9e-4 away."""
    assert claimed(secure__min_sites=3)._variation(4.0, 10**6, 2) == pytest.approx(9e-4, rel=0.05)


@pytest.mark.parametrize("sigma", [4.0, 5.5, 11.0])
def test_the_discrete_gaussian_is_as_far_from_a_rounded_continuous_one_as_is_counted(sigma):
    """By the divergence, which bounds the distance of d entries by sqrt(d KL / 2); with 60 digits."""
    with decimal.localcontext(prec=60):
        s2 = Decimal(sigma) ** 2
        s, reach = (s2 - 1 / Decimal(12)).sqrt(), math.ceil(12 * sigma)
        weights_ = [(-(Decimal(k) ** 2) / (2 * s2)).exp() for k in range(reach + 1)]
        total, divergence_ = 2 * sum(weights_) - 1, Decimal(0)
        for k, weight in enumerate(weights_):
            inner = normal_tail((k - Decimal(1) / 2) / s) if k else 1 - normal_tail(1 / (2 * s))
            rounded = inner - normal_tail((k + Decimal(1) / 2) / s)
            divergence_ += (2 if k else 1) * weight / total * (weight / total / rounded).ln()
        counted = float(s2**2 * (divergence_ / 2).sqrt())
    assert 8.50e-4 < counted < 8.52e-4 < distributed_dgauss._DISCRETE


@pytest.mark.parametrize("neighbours", list(Adjacency))
def test_sums_of_old_ledgers_cost_at_least_what_they_did_and_what_they_would_cost_now(neighbours):
    """z in units of half the distance of two records: D1 is up to 1.5 of them."""
    for examples, batch in ((0, 0), (400, 8)):
        old = legacy_step(Step(SUMMED, examples, batch, 2.0))
        assert old.kind == OLD_SUMMED
        epsilon = accounting.compute_epsilon({old: 50}, 1e-5, neighbours)
        whole_replaced = neighbours is REPLACE and not examples
        unit = 1.0 if whole_replaced else 1.5
        by_renyi = accounting.compute_epsilon({Step(SUMMED, examples, batch, 2.0 / unit, 1.0): 50}, 1e-5, neighbours)
        assert epsilon == pytest.approx(by_renyi, rel=1e-9)
    assert legacy_step(Step(OWN_SHARE, 0, 0, 2.0)).kind == OLD_OWN_SHARE
    assert legacy_step(Step("poisson", 9, 3, 2.0)) == Step("poisson", 9, 3, 2.0)
    against_all = accounting.epsilon_against_all({Step(OLD_SUMMED, 0, 0, 2.0): 1, Step(OLD_OWN_SHARE, 0, 0, 1.0): 1})
    assert against_all == {Step(OLD_SUMMED, 0, 0, 1.0): 1}


def test_sums_compose_with_all_other_charges():
    mine, theirs = {Step(SUMMED, 400, 8, 2.0, 1.0): 50}, {Step("poisson", 400, 8, 1.5): 20}
    own = {Step(OWN_SHARE, 400, 8, 1.0, 1.0): 50}
    together = accounting.compute_epsilon(mine | own | theirs, 1e-5, REPLACE)
    parts = [accounting.compute_epsilon(c, 5e-6, REPLACE) for c in (mine, theirs)]
    assert together == pytest.approx(sum(parts))
    fine = {Step(SUMMED, 400, 8, 2.0, 1e-14): 50}
    one = accounting.compute_epsilon({Step("poisson", 400, 8, 2.0): 50} | theirs, 1e-5, REPLACE)
    assert one < accounting.compute_epsilon(fine | own | theirs, 1e-5, REPLACE) < one * 1.002
    old = {Step(OLD_SUMMED, 400, 8, 2.0): 50}
    parts = [accounting.compute_epsilon(c, 5e-6, REPLACE) for c in (old, fine | theirs)]
    assert accounting.compute_epsilon(old | fine | theirs, 1e-5, REPLACE) == pytest.approx(sum(parts))
    whole = accounting.compute_epsilon({Step(SUMMED, 0, 0, 4.0, 1.0): 3, Step("gaussian", 0, 0, 5.0): 2}, 1e-5, ZERO)
    assert whole == pytest.approx(
        accounting.compute_epsilon({Step(SUMMED, 0, 0, (3 / 16 + 2 / 25) ** -0.5, 1.0): 1}, 1e-5, ZERO)
    )
    assert (
        accounting.compute_epsilon({Step(SUMMED, 0, 0, 4.0): 3, Step("fixed", 40, 4, 2.0): 2}, 1e-5, ZERO) == math.inf
    )


@pytest.mark.parametrize("honest, alone", [(2, 12.3), (3, 15.9), (5, 22.2), (10, 35.6)])
def test_the_own_share_costs_a_multiple_of_a_claim_of_8(honest, alone):
    z = accounting.noise_multiplier_for(lambda z: {Step(SUMMED, 0, 0, z): 10}, 8.0, 1e-5, REPLACE)
    shares = {Step(OWN_SHARE, 0, 0, z / math.sqrt(honest)): 10}
    own = accounting.compute_epsilon(accounting.epsilon_against_all(shares), 1e-5, REPLACE)
    assert own == pytest.approx(alone, abs=0.06)


@pytest.mark.long
@pytest.mark.parametrize("honest, alone, unsampled", [(2, 5.62, 4.23), (3, 9.81, 5.35), (5, 21.5, 7.24)])
def test_the_own_share_of_sampled_steps_costs_far_more_than_a_gaussian_of_the_same_claim(honest, alone, unsampled):
    """n 1000, b 10, z 1, T 1000: a claim of 2.84."""
    shares = {Step(OWN_SHARE, 1000, 10, 1 / math.sqrt(honest)): 1000}
    own = accounting.compute_epsilon(accounting.epsilon_against_all(shares), 1e-5, REPLACE)
    assert own == pytest.approx(alone, rel=0.01)
    once = accounting.noise_multiplier_for(lambda z: {Step("gaussian", 0, 0, z): 1}, 2.8434, 1e-5, REPLACE)
    mapped = accounting.compute_epsilon({Step("gaussian", 0, 0, once / math.sqrt(honest)): 1}, 1e-5, REPLACE)
    assert mapped == pytest.approx(unsampled, rel=0.01)


def test_beyond_what_the_table_of_the_sampler_carries_no_epsilon_is_known():
    assert accounting.compute_epsilon({Step(SUMMED, 0, 0, 0.5, 1.0): 1}, 1e-5, ZERO) < 20
    assert accounting.compute_epsilon({Step(SUMMED, 0, 0, 0.1, 1.0): 1}, 1e-5, ZERO) == math.inf
    assert discrete_gaussian.total_variation_bound(1 << 43, discrete_gaussian.MOST_SIGMA) < accounting._TABLE_DISTANCE


def test_both_figures_of_a_charge():
    """h = 5 - 1. The private part keeps its noise at the site in both."""
    plan = SamplingPlan(3, 1, 8, 40, REPLACE)
    assert claimed().privacy_spent(plan) == {Step(SUMMED, 40, 8, 1.25, 1.0): 3, Step(OWN_SHARE, 40, 8, 0.625, 1.0): 3}
    z, alone = (3.0**-2 + 4.0**-2) ** -0.5, (3.0**-2 + 2.0**-2) ** -0.5
    charges = claimed("dp_fpl", FPL).privacy_spent(plan)
    assert {kind: values for (kind, *values, _), _ in charges.items()} == {
        SUMMED: [40, 8, pytest.approx(z)], OWN_SHARE: [40, 8, pytest.approx(alone)]
    }  # fmt: skip
    disjoint = claimed("dp_fpl", FPL + "\nsampling = 'disjoint'").privacy_spent(plan)
    assert {kind: values for (kind, *values, _), _ in disjoint.items()} == {
        SUMMED: [0, 0, pytest.approx(z)], OWN_SHARE: [0, 0, pytest.approx(alone)]
    }  # fmt: skip
    against_all = accounting.epsilon_against_all({**claimed().privacy_spent(plan), Step("gaussian", 0, 0, 9.0): 1})
    assert against_all == {Step(SUMMED, 40, 8, 0.625, 1.0): 3, Step("gaussian", 0, 0, 9.0): 1}
    with pytest.raises(ConfigError, match="steps: expected 1 between two sums"):
        claimed().privacy_spent(SamplingPlan(3, 2, 8, 40, REPLACE))


@pytest.mark.long
def test_the_ledger_charges_the_noise_of_the_sum_and_keeps_the_own_share_beside_it(tmp_path):
    ledger, plan = PrivacyLedger(tmp_path), SamplingPlan(1, 1, 8, 40, REPLACE)
    charges = claimed().privacy_spent(plan)
    once = accounting.compute_epsilon(charges, 1e-5, REPLACE)
    alone = accounting.compute_epsilon(accounting.epsilon_against_all(charges), 1e-5, REPLACE)
    assert once < alone
    terms, own = RunTerms("r", PrivacyBudget(once * 1.01, 1e-5, REPLACE), 5, 5), PrivacyBudget(math.inf, 1e-5, REPLACE)
    ledger.charge(terms, charges, own)
    account = ledger.read(own).account
    assert account.standing(Party.SERVER).composed == pytest.approx(once)
    assert account.standing(Party.ALL).composed == pytest.approx(alone)
    with pytest.raises(BudgetError, match="epsilon"):
        ledger.charge(terms, charges, own)


@pytest.mark.parametrize("neighbours", list(Adjacency))
@pytest.mark.parametrize("entries", [1, 5, 300])
def test_rounding_moves_integers_of_neighbours_by_no_more_than_the_noise_counts(neighbours, entries):
    """Vectors at the largest distance, in random directions and towards the corners; sigma = z D1."""
    claim, rng = claimed(dp__adjacency=neighbours.value), np.random.default_rng(3)
    part = 0.5 * 2.0 / 8
    scale = claim.scale(entries, 1.0, 2**31 / 10)
    sigma = claim.deviation(scale, entries, 1.0) * math.sqrt(4)
    moved, worst = 1 + (neighbours is REPLACE), 0.0
    for i in range(400):
        direction = rng.normal(size=entries) if i % 2 else rng.choice([-1.0, 1.0], entries)
        x = rng.uniform(-1, 1, entries)
        y = x + moved * part * direction / np.linalg.norm(direction)
        ours = [np.round(scale * np.clip(v.astype(np.float32), -1, 1).astype(float)) for v in (x, y)]
        worst = max(worst, float(np.linalg.norm(ours[0] - ours[1])))
    assert sigma / worst >= 1.25 / moved
    assert sigma == pytest.approx(1.25 * (part * scale + math.sqrt(entries) * (1 + 2**-21 * scale)), rel=1e-4)


@pytest.mark.long
@given(
    entries=st.integers(1, 1 << 30), noise=st.floats(0.05, 50.0), rate=st.floats(1e-3, 10.0), sites=st.integers(2, 200)
)
@settings(max_examples=300, deadline=None)
def test_whatever_scale_is_found_its_noise_can_be_drawn(entries, noise, rate, sites):
    """Where the table bounds the scale, sums of floats may be above the bound: found in a run of 1.4 M weights."""
    claim = claimed(dp__noise_multiplier=noise, dp__learning_rate=rate, secure__min_sites=sites)
    try:
        scale = claim.scale(entries, 4.0, 2.0**62)
    except ConfigError:
        return
    assert discrete_gaussian.LEAST_SIGMA <= claim.deviation(scale, entries, 4.0) <= discrete_gaussian.MOST_SIGMA


@pytest.mark.parametrize("bits,entries", [(32, 1), (32, 10**6), (64, 10**8)])
def test_the_scale_is_as_fine_as_noise_makes_sensible_and_its_table_small(bits, entries):
    claim = claimed()
    scale = claim.scale(entries, 1.0, 2 ** (bits - 1) / 10)
    assert discrete_gaussian.LEAST_SIGMA <= claim.deviation(scale, entries, 1.0) <= discrete_gaussian.MOST_SIGMA
    assert scale + discrete_gaussian.TAIL * claim.deviation(scale, entries, 1.0) < 2 ** (bits - 1) / 10
    assert 0 < claim.excess(scale, entries, 1.0) < {1: 0.01, 10**6: 0.03, 10**8: 0.3}[entries]


@pytest.mark.parametrize(
    "name,changes,reason",
    [
        ("fedavg", {"secure__enabled": False}, 'secure.noise: "sum" requires secure.enabled = true'),
        ("fedavg", {"secure__max_weight": 2}, 'secure.max-weight: secure.noise = "sum" requires 1'),
        (
            "fedavg",
            {"secure__max_colluders": 5},
            "secure.max-colluders: expected less than 5 .secure.min-sites., found 5",
        ),
        ("fedavg", {"dp__noise_multiplier": 0.0}, "without noise"),
        ("fedavg", {"train__max_steps": 2}, "train.max-steps: expected 1 .*found 2: a second step would compute"),
        ("fedavg", {"train__max_steps": 0}, "train.max-steps: expected 1"),
        ("dp_fpl", {"fields": "exchange = 'epoch'"}, 'exchange: secure.noise = "sum" requires "batch"'),
        ("dp_fpl", {"fields": "clipped = 'texts'"}, 'clipped: secure.noise = "sum" requires "prompt"'),
        ("dp_fpl", {"fields": "mode = 'paper'\nepsilon = 1.0"}, 'mode: secure.noise = "sum" requires "strict"'),
        ("dp_fpl", {"fields": "wire_dtype = 'bfloat16'"}, 'wire_dtype: secure.noise = "sum" requires "float32"'),
        ("dp_fpl", {"fields": "sampling = 'fixed'"}, "sampling: secure.noise"),
        ("dp_fpl", {"fields": "noise_local = 0.0"}, "without noise"),
    ],
)
def test_what_noise_in_the_sum_does_not_fit_is_refused_with_the_key(name, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        claimed(name, **changes)


def test_a_run_without_noise_is_refused_and_one_with_it_keeps_its_budget():
    with pytest.raises(ConfigError, match="found no noise; set dp"):
        guarantee_of(strategies.create_method("fedavg"), parse(SUM))
    config = parse(DP | SUM | {"dp.epsilon": 3.0})
    assert promised_epsilon(strategies.create_method("fedavg"), config, 1e-5) == 3.0


def test_noise_that_no_ring_holds_is_refused():
    with pytest.raises(ConfigError, match="secure.clip-bound: .* is too large for"):
        claimed(dp__learning_rate=1e-7).scale(1000, 1e6, 2**31 / 10)
    with pytest.raises(ConfigError, match="secure.clip-bound"):
        claimed().scale(1 << 31, 1.0, 2**62)
