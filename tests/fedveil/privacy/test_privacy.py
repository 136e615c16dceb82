from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedveil import strategies
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.config import parse
from fedveil.contract.privacy import (
    Adjacency,
    PrivacyBudget,
    SamplingPlan,
    Step,
    check_seeded,
    joint_budget,
    stated_guarantee,
)
from fedveil.errors import ConfigError, PolicyError
from fedveil.privacy import accounting, clipping, gaussian_noise
from fedveil.rng import RandomStream

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
DELTA = 1e-5


def gdp(mu: float, delta: float = DELTA) -> float:
    """The closed formula: delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)."""

    def excess(eps: float) -> float:
        tail = math.exp(eps + stats.norm.logcdf(-eps / mu - mu / 2))
        return stats.norm.cdf(-eps / mu + mu / 2) - tail - delta

    return optimize.brentq(excess, 0, 40 * mu + mu**2)


# --- accounting


@pytest.mark.parametrize("neighbours, moved", [(ZERO, 1), (REPLACE, 2)])
@pytest.mark.parametrize("z, steps", [(3.14159, 7), (21.7, 300), (0.9, 1)])
def test_gaussian_steps_agree_with_the_closed_formula(z, steps, neighbours, moved):
    charges = accounting.max_charged(z, "disjoint", SamplingPlan(steps, 1, 5, 5, REPLACE), True)
    epsilon = accounting.compute_epsilon(charges, DELTA, neighbours)
    assert epsilon == pytest.approx(gdp(moved * math.sqrt(steps) / z), rel=0.01)


@pytest.mark.parametrize(
    "plan, across, uses",
    [
        ((10, 1, 5, 23), True, 3),  # 4 batches an epoch: rounds 0-3, 4-7, 8-9
        ((10, 1, 5, 23), False, 10),  # each participation begins an epoch
        ((10, 4, 5, 23), False, 10),
        ((10, 9, 5, 23), False, 30),
    ],
)
def test_disjoint_batches_are_charged_once_an_epoch(plan, across, uses):
    assert accounting.max_charged(2.0, "disjoint", SamplingPlan(*plan, REPLACE), across) == {
        Step("gaussian", 0, 0, 2.0): uses
    }


@given(
    rows=st.integers(0, 5), bound=st.floats(0.01, 10), spike=st.sampled_from([0.0, 1.0, 1e6, 1e30, math.inf, math.nan]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_clipped_sum_of_outer_products_is_that_of_the_whole_gradients(rows, bound, spike, seed):
    """Its twin forms every product; replacing a row, whatever its norm, moves the sum by at most 2 C."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows + 1, 4, generator=generator), torch.randn(rows + 1, 3, generator=generator)
    outer_sum = clipping.clipped_outer_sum(left, right, bound)
    assert torch.allclose(
        outer_sum, clipping.clipped_sum({"": left[:, :, None] * right[:, None]}, bound)[""], atol=1e-4
    )
    other = left.clone()
    other[rows] = -spike * left[rows]
    moved = float((clipping.clipped_outer_sum(other, right, bound) - outer_sum).norm())
    assert moved <= 2 * bound * (1 + 1e-5)
    if spike == 1e6 and float(left[rows].norm() * right[rows].norm()) > bound:
        assert moved == pytest.approx(2 * bound, rel=1e-3)


def test_outer_products_of_no_rows_and_bad_bounds():
    assert torch.equal(clipping.clipped_outer_sum(torch.zeros(0, 4), torch.zeros(0, 3), 1.0), torch.zeros(4, 3))
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bound"):
            clipping.clipped_outer_sum(torch.ones(1, 2), torch.ones(1, 2), bound)


def test_joint_is_the_composition():
    both = {Step("gaussian", 0, 0, 3.0): 1, Step("gaussian", 0, 0, 5.0): 1}
    alone = {Step("gaussian", 0, 0, joint_budget(3.0, 5.0)): 1}
    assert accounting.compute_epsilon(both, DELTA, ZERO) == pytest.approx(
        accounting.compute_epsilon(alone, DELTA, ZERO), rel=1e-9
    )
    assert joint_budget(3.0, 0.0) == 0.0


@pytest.mark.parametrize("rate,z", [(0.01, 1.0), (0.2, 2.83), (0.5, 30.0), (0.9, 0.7), (1.0, 3.0)])
def test_the_bound_on_the_mean_loss_is_above_the_loss_itself(rate, z):
    """Against numerical integration over both pairs of neighbours, for a step moved by 1."""
    x = torch.linspace(-12 * z - 2, 12 * z + 2, 400_001, dtype=torch.float64)
    normal = lambda at: torch.exp(-((x - at) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))  # noqa: E731
    mixed = lambda at: (1 - rate) * normal(0.0) + rate * normal(at)  # noqa: E731
    kl = lambda p, q: float(torch.trapezoid(torch.where(p > 0, p * (p / q).log(), 0.0), x))  # noqa: E731
    mean_loss = accounting.mean_loss({Step("poisson" if rate < 1 else "gaussian", 1000, round(1000 * rate), z): 7})
    for p, q in ((mixed(1.0), mixed(-1.0)), (mixed(1.0), normal(0.0)), (normal(0.0), mixed(1.0))):
        assert mean_loss >= 7 * kl(p, q) * (1 - 1e-9)
    assert accounting.mean_loss({Step("poisson", 10, 1, 0.0): 1}) == math.inf


def test_without_noise_epsilon_is_infinite_and_without_charges_zero():
    charges = accounting.max_charged(0.0, "poisson", SamplingPlan(2, 1, 5, 10, REPLACE), True)
    assert accounting.compute_epsilon(charges, DELTA, REPLACE) == math.inf
    assert accounting.compute_epsilon({}, DELTA, ZERO) == 0.0


@pytest.mark.parametrize("wished", [0.5, 4.0])
def test_calibrated_noise_keeps_the_epsilon_and_wastes_little(wished):
    cost = lambda z: accounting.max_charged(z, "disjoint", SamplingPlan(30, 1, 5, 20, REPLACE), True)  # noqa: E731
    z = accounting.noise_multiplier_for(cost, wished, DELTA, REPLACE)
    assert 0.99 * wished < accounting.compute_epsilon(cost(z), DELTA, REPLACE) <= wished


@pytest.mark.long
@pytest.mark.parametrize(
    "steps, batch, rows, wished, neighbours",
    [(20, 16, 240, 0.7, REPLACE), (3000, 64, 50_000, 0.5, ZERO)],  # coarse grids are near here, and far off there
)
def test_coarse_grids_find_the_noise_and_the_digits_of_the_finest(steps, batch, rows, wished, neighbours, monkeypatch):
    def cost(z: float) -> dict:
        return accounting.max_charged(z, "poisson", SamplingPlan(steps, 1, batch, rows, neighbours), True)

    multiples = []
    original = accounting._distributions
    monkeypatch.setattr(accounting, "_distributions", lambda *a: multiples.append(a[2]) or original(*a))
    accounting._epsilon.cache_clear()
    noise_multiplier = accounting.noise_multiplier_for(cost, wished, DELTA, neighbours)
    assert multiples.count(1) <= 3  # this takes most of the time
    assert accounting.compute_epsilon(cost(noise_multiplier), DELTA, neighbours) <= wished
    assert (
        accounting.compute_epsilon(cost(noise_multiplier / 2 ** (1 / 1024)), DELTA, neighbours) > wished
    )  # the search's next smaller z
    for z in (noise_multiplier, noise_multiplier * 1.2345):
        rounded_epsilon, exact = (
            tell(cost(z), DELTA, neighbours) for tell in (accounting.round_epsilon, accounting.compute_epsilon)
        )
        assert rounded_epsilon >= exact * (1 - 1e-9)
        assert stated_guarantee(rounded_epsilon, DELTA, neighbours) == stated_guarantee(exact, DELTA, neighbours)


def test_the_coarsest_grid_tells_the_digits_where_that_is_certain():
    accounting._epsilon.cache_clear()
    charges = {Step("poisson", 500, 16, 0.5212): 24}
    assert f"{accounting.round_epsilon(charges, DELTA, REPLACE):.4g}" == "7.987"  # 7.98742657 on the finest grid
    assert accounting._epsilon.cache_info().misses < 6  # grids that were tried


@pytest.mark.parametrize(
    "act, named",
    [
        (lambda: SamplingPlan(1, 1, 33, 32, ZERO), "batch-size: expected at most the site's 32"),
        (lambda: SamplingPlan(0, 1, 3, 32, ZERO), "rounds"),
        (lambda: accounting.compute_epsilon({}, 0.0, ZERO), "delta"),
        (lambda: accounting.noise_multiplier_for(lambda z: {}, 0.0, DELTA, ZERO), "epsilon"),
        (lambda: accounting.noise_multiplier_for(lambda z: {}, -1.0, DELTA, ZERO), "epsilon"),
        (lambda: accounting.max_charged(1.0, "fixed", SamplingPlan(1, 1, 3, 32, ZERO), True), "sampling"),
        (lambda: check_seeded(PrivacyBudget(1.0, DELTA, ZERO), True), "run.deterministic"),
        (lambda: check_seeded(PrivacyBudget(math.inf, DELTA, ZERO, 0.1), True), "run.deterministic"),
    ],
)
def test_bad_input_is_refused(act, named):
    with pytest.raises(ConfigError, match=named):
        act()


def test_an_epsilon_is_stated_with_its_relation():
    assert stated_guarantee(1.25, DELTA, REPLACE) == "epsilon 1.25 at delta 1e-05 (replace-one)"
    assert "infinite" in stated_guarantee(math.inf, DELTA, ZERO)


# --- clipping


def rows(seed: int, count: int, scale: float = 3.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "u": scale * torch.randn(count, 4, 2, generator=generator),
        "v": scale * torch.randn(count, 2, 3, generator=generator),
    }


def flat(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in sums.values()]).double()


def test_clipping_by_hand():
    gradients = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[4.0], [0.4]])}
    sums = clipping.clipped_sum(gradients, 1.0)  # norms 5 and 0.5
    assert torch.allclose(sums["a"], torch.tensor([0.6 + 0.3, 0.0]))
    assert torch.allclose(sums["b"], torch.tensor([0.8 + 0.4]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(1e-3, 1e3), st.sampled_from([0.0, 1e-20, 1.0, 1e6, 1e30]))
def test_replacing_one_row_moves_the_sum_by_at_most_two_bounds(seed, count, bound, scale):
    gradients = rows(seed, count)
    other = {n: g.clone() for n, g in gradients.items()}
    drawn = rows(seed + 1, 1, scale)
    for name in other:
        other[name][seed % count] = drawn[name][0]
    moved = (flat(clipping.clipped_sum(gradients, bound)) - flat(clipping.clipped_sum(other, bound))).norm()
    assert moved <= 2 * bound * (1 + 1e-5) + 1e-6 * count * bound
    naive = torch.zeros(14, dtype=torch.float64)
    for i in range(count):
        g = flat({n: t[i] for n, t in other.items()})
        naive += g * min(1.0, bound / float(g.norm())) if g.norm() else 0.0
    assert torch.allclose(flat(clipping.clipped_sum(other, bound)), naive, rtol=1e-4, atol=1e-5 * bound)


def test_the_bound_is_reached_and_batch_clipping_breaks_it():
    """One row of norm 1e6 turns a batch's mean; as a sum that is 2 C B."""
    small = torch.zeros(8, 3)
    small[:, 0] = 5.0
    big = small.clone()
    big[0, 0] = -1e6
    by_row = clipping.clipped_sum({"g": small}, 1.0)["g"] - clipping.clipped_sum({"g": big}, 1.0)["g"]
    assert by_row.norm() == pytest.approx(2.0)
    by_batch = 8 * (clipping.clipped_mean(small, 8, 1.0) - clipping.clipped_mean(big, 8, 1.0))
    assert by_batch.norm() == pytest.approx(16.0)
    assert by_batch.norm() > 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_part(bad):
    gradients = rows(3, 4)
    gradients["v"][2, 0, 0] = bad
    finite_gradients = {n: g[[0, 1, 3]] for n, g in gradients.items()}
    assert torch.allclose(flat(clipping.clipped_sum(gradients, 1.0)), flat(clipping.clipped_sum(finite_gradients, 1.0)))


def test_no_rows_are_zeros_and_a_bad_bound_is_refused():
    assert not flat(clipping.clipped_sum(rows(1, 0), 1.0)).any()
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bound"):
            clipping.clipped_sum(rows(1, 2), bound)


# --- noise


def test_noise_is_normal_and_comes_from_its_source():
    drawn = gaussian_noise.draw_gaussian((200_001,), 2.5, RandomStream(bytes(32)).bytes).numpy() / 2.5
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    again = gaussian_noise.draw_gaussian((200_001,), 2.5, RandomStream(bytes(32)).bytes).numpy() / 2.5
    assert (drawn == again).all()


def test_the_ends_of_the_bytes_give_finite_noise():
    for byte in (b"\x00", b"\xff"):
        assert torch.isfinite(gaussian_noise.draw_gaussian((5,), 1.0, lambda n, b=byte: b * n)).all()


def test_no_noise_asks_for_no_bytes_and_a_bad_std_is_refused():
    def source(n: int) -> bytes:
        raise AssertionError

    assert not gaussian_noise.draw_gaussian((3,), 0.0, source).any()
    for std in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="std"):
            gaussian_noise.draw_gaussian((3,), std, source)
    assert gaussian_noise.add_noise(torch.ones(2, 3), 1.0, RandomStream(bytes(32)).bytes).dtype == torch.float32


@pytest.mark.long
def test_charges_of_two_kinds_cost_less_together_than_apart():
    step = Step("gaussian", 0, 0, 10.0)
    poisson, fixed = {Step("poisson", 50, 5, 1.5): 4}, {Step("fixed", 50, 5, 8.0): 3}
    alone = [accounting.compute_epsilon(charges, DELTA, REPLACE) for charges in (poisson, fixed)]
    epsilon = accounting.compute_epsilon(poisson | fixed, DELTA, REPLACE)
    assert max(alone) < epsilon < sum(alone)
    assert accounting.compute_epsilon(poisson | fixed | {step: 5}, DELTA, REPLACE) > epsilon


def test_a_draw_without_replacement_has_no_epsilon_where_the_number_of_rows_changes():
    assert accounting.compute_epsilon({Step("fixed", 50, 5, 8.0): 3}, DELTA, ZERO) == math.inf


def test_the_old_name_of_zero_out_is_refused_with_the_new_one(tmp_path: Path) -> None:
    """Run config, policy and method fields refuse "add-or-remove-one" and name "zero-out"."""
    file = tmp_path / "policy.toml"
    file.write_text('adjacency = "add-or-remove-one"')
    with pytest.raises(ConfigError, match="now called.*zero-out"):
        parse({"dp.adjacency": "add-or-remove-one"})
    with pytest.raises(PolicyError, match="now called.*zero-out"):
        load_policy(SiteConfig(policy=str(file)))
    with pytest.raises(ConfigError, match="zero-out"):
        strategies.create_method("dp_fpl", 'neighbours = "add-or-remove-one"\nadapter = {length = 9}')
