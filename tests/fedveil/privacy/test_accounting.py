"""Epsilon of sampled steps, compared with published figures and with the tests' own accountant."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedveil.contract.privacy import Adjacency, SamplingPlan, Step
from fedveil.errors import ConfigError
from fedveil.privacy import accounting, dominating_pairs
from tests.fedveil.privacy.normal_tail import normal_tail

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
DELTA = 1e-5
LONG = pytest.mark.long
NO_SHRINKING = tuple(phase for phase in Phase if phase is not Phase.shrink)  # an example takes a second


# --- an accountant of the tests' own: densities on a line, losses on a grid, one Fourier transform


@dataclass(frozen=True)
class Mixture:
    """Normal densities of one standard deviation, as (weight, mean)."""

    parts: tuple[tuple[float, float], ...]

    def log_density(self, at: np.ndarray, sd: float) -> np.ndarray:
        logs = [math.log(w) - ((at - mean) / sd) ** 2 / 2 for w, mean in self.parts if w]
        return np.logaddexp.reduce(logs)


def losses(first: Mixture, second: Mixture, sd: float, joint: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of (first, second) and their masses; of the joint pair, by its definition."""
    at, width = np.linspace(-2 - 9 * sd, 2 + 9 * sd, 20_001, retstep=True)
    loss = first.log_density(at, sd) - second.log_density(at, sd)
    masses, others = (width / (sd * math.sqrt(2 * math.pi)) * np.exp(of.log_density(at, sd)) for of in (first, second))
    if not joint:
        return loss, masses
    where = loss > 0
    rest = 1 - masses[where].sum() - others[where].sum()
    return np.concatenate([loss[where], -loss[where], [0.0]]), np.concatenate([masses[where], others[where], [rest]])


def oracle_epsilon(steps: Sequence[tuple[Mixture, Mixture, float, bool, int]], delta: float) -> float:
    """Compose the steps and return epsilon. A loss is shared out between two grid points so that its mean stays."""
    parts = [(*losses(*step[:4]), step[4]) for step in steps]
    mean = sum(count * float(loss @ mass) for loss, mass, count in parts)
    spread = math.sqrt(sum(count * float((loss**2) @ mass) for loss, mass, count in parts))
    widest = max(float(np.abs(loss).max()) for loss, _, _ in parts)
    size = 1 << 18
    h = (2 * abs(mean) + 30 * spread + 2 * widest) / size
    product = np.ones(size // 2 + 1, dtype=complex)
    for loss, mass, count in parts:
        low = np.floor(loss / h).astype(int)
        upper = loss / h - low
        grid = np.zeros(size)
        np.add.at(grid, low % size, mass * (1 - upper))
        np.add.at(grid, (low + 1) % size, mass * upper)
        product *= np.fft.rfft(grid) ** count
    composed = np.fft.irfft(product, size)
    at = np.arange(size)
    at[at >= size // 2] -= size
    values = at * h

    def excess(epsilon: float) -> float:
        over = values > epsilon
        return float(-np.expm1(epsilon - values[over]) @ composed[over]) - delta

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, values.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def oracle(charges: dict[Step, int], delta: float, neighbours: Adjacency) -> float:
    """Return the oracle's epsilon, the larger one of both orders."""
    orders: list[list] = [[], []]
    none = Mixture(((1.0, 0.0),))
    for (kind, examples, batch, z, _), count in charges.items():
        q = batch / examples if examples else 1.0
        at = lambda mean, q=q: Mixture(((1 - q, 0.0), (q, mean)))  # noqa: E731
        if kind == "fixed":
            pair = (at(2.0), none, z, True, count)
            both = (pair, pair)
        elif neighbours is REPLACE:
            pair = (at(-1.0), at(1.0), z, False, count)
            both = (pair, pair)
        else:
            both = ((at(1.0), none, z, False, count), (none, at(1.0), z, False, count))
        for order, step in zip(orders, both, strict=True):
            order.append(step)
    return max(oracle_epsilon(order, delta) for order in orders)


# --- tables: rows, batch, z, steps, delta, replace-one, zero-out

POISSON = [
    (100, 10, 1.5, 50, 1e-5, 4.1602, 2.5302),
    (57, 32, 3.0, 60, 1e-5, 15.6715, 7.1066),
    (57, 8, 2.0, 30, 1e-5, 3.2506, 1.8559),
    pytest.param(1000, 32, 1.0, 100, 1e-5, 3.0336, 2.2559, marks=LONG),
    (400, 16, 1.5, 200, 1e-5, 3.2145, 1.8396),
    pytest.param(1000, 10, 0.6, 1000, 1e-5, 8.7673, 7.4336, marks=LONG),
    pytest.param(1000, 10, 1.0, 1000, 1e-5, 2.8434, 1.8282, marks=LONG),
    pytest.param(10_000, 64, 0.8, 2000, 1e-6, 4.2488, 3.1673, marks=LONG),
    (200, 50, 4.0, 100, 1e-5, 5.6464, 2.6910),
    pytest.param(100_000, 256, 1.0, 4000, 1e-6, 1.5346, 0.9597, marks=LONG),
    (60, 30, 8.0, 100, 1e-5, 5.6666, 2.5968),
    (1000, 100, 3.0, 300, 1e-5, 5.1536, 2.4948),
    pytest.param(1000, 1, 0.5, 1000, 1e-5, 3.2921, 3.2389, marks=LONG),
    (500, 5, 1.2, 20, 1e-3, 0.1501, 0.0950),
]
FIXED = [  # rows, batch, z, steps, epsilon, and a lower bound that one pair of data sets attains
    (100, 10, 1.5, 50, 9.8954, 9.2358),
    (57, 32, 3.0, 60, 18.6377, 17.8415),
    (57, 8, 2.0, 30, 6.0318, 5.7038),
    (1000, 32, 2.0, 100, 2.4612, 2.2559),
    pytest.param(400, 16, 1.5, 200, 8.0809, 7.2425, marks=LONG),
    pytest.param(1000, 10, 1.0, 1000, 14.8207, 13.3608, marks=LONG),
    (200, 50, 4.0, 100, 6.9304, 6.4492),
    (57, 8, 7.0, 100, 1.7621, 1.6692),
    (100, 32, 10.0, 100, 2.8086, 2.7206),
    (1000, 16, 3.0, 300, 0.9517, 0.8281),
    (500, 50, 4.0, 50, 1.7615, 1.6525),
]


def agrees(epsilon: float, figure: float) -> bool:
    """At most 1 % above a figure of four decimals, and below it by no more than 1e-4."""
    return figure * (1 - 1e-4) - 5e-5 <= epsilon <= figure * 1.01


@pytest.mark.parametrize("rows, batch, z, steps, delta, replaced, zeroed", POISSON)
def test_poisson_sampling_costs_what_three_other_accountants_say(rows, batch, z, steps, delta, replaced, zeroed):
    charges = {Step("poisson", rows, batch, z): steps}
    assert agrees(accounting.compute_epsilon(charges, delta, REPLACE), replaced)
    assert agrees(accounting.compute_epsilon(charges, delta, ZERO), zeroed)


@pytest.mark.parametrize("rows, batch, z, steps, upper, lower", FIXED)
def test_batches_of_fixed_size_cost_the_joint_pair_and_more_than_one_pair_of_data_sets(
    rows, batch, z, steps, upper, lower
):
    epsilon = accounting.compute_epsilon({Step("fixed", rows, batch, z): steps}, DELTA, REPLACE)
    assert agrees(epsilon, upper)
    assert epsilon > lower * 1.02
    assert accounting.compute_epsilon({Step("fixed", rows, batch, z): steps}, DELTA, ZERO) == math.inf


@pytest.mark.parametrize(
    "charges, delta, neighbours, figure",
    [
        ({Step("gaussian", 0, 0, 4.0): 60}, 1e-5, REPLACE, 23.3463),
        ({Step("gaussian", 0, 0, 4.0): 60}, 1e-5, ZERO, 9.6084),
        ({Step("gaussian", 0, 0, 20.0): 100}, 1e-6, REPLACE, 4.8866),
        (
            {Step("poisson", 10, 1, 2.0): 20, Step("gaussian", 0, 0, 9.0): 5, Step("poisson", 10, 3, 3.0): 7},
            1e-5,
            REPLACE,
            3.6330,
        ),
        ({Step("poisson", 10, 1, 1.5): 25, Step("fixed", 10, 1, 3.0): 25}, 1e-5, REPLACE, 3.4842),
        ({Step("poisson", 10, 1, 0.5**0.5): 50}, 1e-5, REPLACE, 12.8413),  # DP-FPL: two releases of z = 1 share a look
    ],
)
def test_gaussian_steps_mixed_kinds_and_two_releases_cost_one_composition(charges, delta, neighbours, figure):
    assert agrees(accounting.compute_epsilon(charges, delta, neighbours), figure)


# --- properties

MULTIPLIERS = st.floats(0.7, 6.0)
SAMPLED = st.builds(Step, st.just("poisson"), st.just(1000), st.integers(1, 999), MULTIPLIERS)
FIXED_SIZE = st.builds(Step, st.just("fixed"), st.just(1000), st.integers(1, 999), MULTIPLIERS)
WHOLE = st.builds(Step, st.just("gaussian"), st.just(0), st.just(0), st.floats(2.0, 9.0))
COUNTS = st.integers(1, 12)


@LONG
@given(
    charges=st.dictionaries(st.one_of(SAMPLED, FIXED_SIZE, WHOLE), COUNTS, min_size=1, max_size=3),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
@settings(max_examples=8, phases=NO_SHRINKING)
def test_no_figure_is_below_the_tests_own_accountant_under_replace_one(charges, delta):
    figure, exact = accounting.compute_epsilon(charges, delta, REPLACE), oracle(charges, delta, REPLACE)
    assert exact * (1 - 1e-4) - 1e-6 <= figure <= exact * 1.01 + 1e-4


@LONG
@given(
    charges=st.dictionaries(st.one_of(SAMPLED, WHOLE), COUNTS, min_size=1, max_size=3),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
@settings(max_examples=8, phases=NO_SHRINKING)
def test_no_figure_is_below_the_tests_own_accountant_under_zero_out(charges, delta):
    figure, exact = accounting.compute_epsilon(charges, delta, ZERO), oracle(charges, delta, ZERO)
    assert exact * (1 - 1e-4) - 1e-6 <= figure <= exact * 1.01 + 1e-4


@LONG
@given(kind=st.sampled_from(["poisson", "fixed"]), z=MULTIPLIERS, batch=st.integers(1, 998), count=COUNTS)
@settings(max_examples=5, phases=NO_SHRINKING)
def test_more_of_anything_costs_no_less(kind, z, batch, count):
    epsilon = lambda *step, count=count: accounting.compute_epsilon({Step(kind, 1000, *step): count}, DELTA, REPLACE)  # noqa: E731
    once = epsilon(batch, z)
    slack = 1 - 1e-4
    assert epsilon(batch + 1, z) >= once * slack
    assert epsilon(batch, z / 1.05) >= once * slack
    assert epsilon(batch, z, count=count + 1) >= once * slack
    assert once <= accounting.compute_epsilon({Step("gaussian", 0, 0, z): count}, DELTA, REPLACE) * (1 + 1e-4)


@pytest.mark.parametrize("neighbours", [ZERO, REPLACE])
def test_mixed_kinds_cost_what_the_tests_own_accountant_says(neighbours):
    charges = {Step("poisson", 100, 13, 1.3): 6, Step("gaussian", 0, 0, 5.0): 4}
    charges |= {Step("fixed", 100, 20, 3.0): 3} if neighbours is REPLACE else {Step("poisson", 100, 70, 4.0): 3}
    figure, exact = accounting.compute_epsilon(charges, DELTA, neighbours), oracle(charges, DELTA, neighbours)
    assert figure == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("neighbours", [ZERO, REPLACE])
def test_a_rate_of_1_is_no_sampling_and_one_of_nearly_0_costs_nothing(neighbours):
    whole = accounting.compute_epsilon({Step("gaussian", 0, 0, 2.0): 5}, DELTA, neighbours)
    assert accounting.compute_epsilon({Step("poisson", 40, 40, 2.0): 5}, DELTA, neighbours) == pytest.approx(
        whole, rel=1e-7
    )
    nearly = {Step("poisson", 10**7, 10**7 - 1, 2.0): 5}
    assert accounting.compute_epsilon(nearly, DELTA, neighbours) == pytest.approx(whole, rel=1e-4)
    rare = {Step("poisson", 10**9, 1, 2.0): 5}
    assert accounting.compute_epsilon(rare, DELTA, neighbours) == 0.0


@pytest.mark.parametrize("kind", ["poisson", "fixed", "gaussian"])
def test_without_noise_epsilon_is_infinite_and_without_steps_0(kind):
    assert accounting.compute_epsilon({Step(kind, 40, 4, 0.0): 1}, DELTA, REPLACE) == math.inf
    assert accounting.compute_epsilon({Step(kind, 40, 4, 1.0): 0}, DELTA, REPLACE) == 0.0


@pytest.mark.parametrize("kind, neighbours", [("poisson", ZERO), ("poisson", REPLACE), ("fixed", REPLACE)])
def test_epsilon_is_0_from_the_total_variation_distance_on(kind, neighbours):
    charges = {Step(kind, 100, 10, 3.0): 4}
    pairs = accounting._pairs(tuple(charges.items()), neighbours)
    (pmf, *_) = accounting._distributions(pairs, DELTA, 1)
    distance = float(pmf.get_delta_for_epsilon(0.0))
    assert accounting.compute_epsilon(charges, distance * 1.001, neighbours) == 0.0
    assert 0 < accounting.compute_epsilon(charges, distance * 0.99, neighbours) < 0.01


def test_the_order_of_composition_changes_nothing_and_the_larger_order_of_data_sets_counts():
    pairs = [
        (dominating_pairs.poisson_zero_out_pair(0.1, 1.5), 20),
        (dominating_pairs.gaussian_pair(5.0, 1.0), 1),
        (dominating_pairs.poisson_zero_out_pair(0.3, 3.0), 7),
    ]
    one, other = (
        [pmf.get_epsilon_for_delta(DELTA) for pmf in dominating_pairs.compose(order, 4e-4, 1e-13)]
        for order in (pairs, pairs[::-1])
    )
    assert one == pytest.approx(other, rel=1e-9)
    assert one[0] > one[1] * 1.2
    charges = {Step("poisson", 10, 1, 1.5): 20, Step("gaussian", 0, 0, 5.0): 1, Step("poisson", 10, 3, 3.0): 7}
    assert accounting.compute_epsilon(charges, DELTA, ZERO) == pytest.approx(max(one), rel=1e-4)


@pytest.mark.parametrize("delta", [1e-10, 1e-9])
def test_epsilon_is_right_at_the_smallest_delta_and_refused_below(delta):
    pairs = [(dominating_pairs.gaussian_pair(8.0, 2.0), 50)]
    closed = accounting.compute_epsilon({Step("gaussian", 0, 0, 8.0): 50}, delta, REPLACE)
    (pmf,) = accounting._distributions(pairs, delta, 1)
    assert pmf.get_epsilon_for_delta(delta) == pytest.approx(closed, rel=1e-4)
    with pytest.raises(ConfigError, match="delta: expected at least 1e-10"):
        accounting.compute_epsilon({Step("poisson", 40, 4, 1.0): 1}, 9e-11, REPLACE)


@given(rate=st.floats(1e-6, 0.999), z=st.floats(0.3, 30.0))
@settings(max_examples=50)
def test_the_masses_of_a_joint_pair_fit_into_one(rate, z):
    """Its two outcomes for each point where A > B need A and B together to have a mass of at most 1 there."""
    at = lambda x: math.erfc(-x / math.sqrt(2)) / 2  # noqa: E731
    assert rate + (2 - 2 * rate) * at(-1 / z) <= 1
    curve = dominating_pairs.fixed_size_pair(rate, z).curve
    loss = np.array([0.0, 1e-3, 0.1, 1.0, 5.0])
    values = curve(loss)
    assert np.all(np.diff(values) <= 0)
    assert values[0] == pytest.approx(rate * (1 - 2 * at(-1 / z)), rel=1e-6)


@pytest.mark.parametrize("rate, z, loss", [(0.1, 1.5, 8.0), (0.01, 1.0, 12.0), (1.0, 4.0, 6.0)])
def test_tails_of_a_curve_have_all_their_digits(rate, z, loss):
    """A tail of 1 minus a distribution function is lost in rounding; with 60 digits it is not."""
    with decimal.localcontext(prec=60):
        half, excess = Decimal(z) / 2, (Decimal(loss).exp() - 1) / Decimal(rate)
        at = 1 / (2 * half) + half * (1 + excess).ln()
        exact = float(Decimal(rate) * (normal_tail(at - 1 / half) - (1 + excess) * normal_tail(at)))
    (value,) = dominating_pairs.fixed_size_pair(rate, z).curve(np.array([loss]))
    assert value == pytest.approx(exact, rel=1e-9, abs=0)
    assert value < 1e-8


def test_disjoint_batches_are_charged_under_zero_out_as_one_gaussian_of_shift_1_an_epoch():
    charges = accounting.max_charged(2.0, "disjoint", SamplingPlan(10, 4, 5, 23, ZERO), False)
    assert charges == {Step("gaussian", 0, 0, 2.0): 10}
    assert accounting.compute_epsilon(charges, DELTA, ZERO) == pytest.approx(
        accounting.compute_epsilon({Step("gaussian", 0, 0, 2 * 2.0): 10}, DELTA, REPLACE), rel=1e-9
    )
