"""The row split of privacy/unit, the noise of each kind of guarantee, and the epsilon of a unit by its row count."""

from __future__ import annotations

import math

import pytest

from fedveil.contract.privacy import Adjacency, Step
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil_bench import runner
from fedveil_bench.privacy import unit
from fedveil_bench.privacy.unit_epsilon import compute_unit_epsilon, noise_for_unit

SETTINGS = runner.read_preset("privacy/unit", "quick")["settings"]
VALUES = [f"description {row % 9}" for row in range(50)]  # nine units with five or six rows


def test_no_unit_is_at_two_sites_and_every_unit_has_as_many_rows_of_one_description():
    sites = unit.draw_units(VALUES, sites=2, units=4, rows=5, seed=0)
    assert [[len(one) for one in site] for site in sites] == [[5] * 4] * 2
    names = [{VALUES[place] for place in one} for site in sites for one in site]
    assert all(len(name) == 1 for name in names)
    assert len(set().union(*names)) == 8
    assert sites != unit.draw_units(VALUES, sites=2, units=4, rows=5, seed=1)


def test_too_few_units_are_refused():
    with pytest.raises(ConfigError, match="expected at most 4"):
        unit.draw_units(VALUES, sites=2, units=5, rows=5, seed=0)
    with pytest.raises(ConfigError, match="expected at most 2"):
        unit.draw_units(VALUES, sites=2, units=4, rows=6, seed=0)


@pytest.mark.long
def test_rows_are_drawn_at_the_rate_of_units_and_a_unit_s_noise_is_that_of_the_same_epsilon():
    noises = unit.compute_noises(SETTINGS, 4)
    assert noises[unit.CLEAR] == 0 < noises[unit.ROW] == noises[unit.UNIT] < noises[unit.BY_ROWS]
    keys = {kind: unit._keys(SETTINGS, kind, 4, z) for kind, z in noises.items()}
    assert (keys[unit.UNIT]["train.batch-size"], keys[unit.ROW]["train.batch-size"]) == (4, 16)
    assert [kind for kind in keys if "dp.unit-column" in keys[kind]] == [unit.UNIT]
    for kind, together in ((unit.UNIT, 1), (unit.BY_ROWS, 4)):
        epsilon = compute_unit_epsilon(0.2, together, noises[kind], 2, 1e-5)
        assert 7.9 < epsilon < 8 * (1 + 1e-3), kind
        assert unit._epsilon_of_unit(SETTINGS, kind, 4, noises[kind])["epsilon of a unit"] == epsilon
    assert unit._epsilon_of_unit(SETTINGS, unit.ROW, 4, noises[unit.ROW])["epsilon of a unit"] > 16


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "rows", "z", "steps", "expected"),
    [(0.032, 4, 4.0, 100, 2.6235), (0.032, 8, 8.0, 100, 2.6248), (0.1, 1, 1.5, 50, 4.1602)],
)
def test_a_unit_by_its_rows_costs_what_the_specification_says(rate, rows, z, steps, expected):
    """Figures of an accountant that is neither this one nor the product's: never below, at most 1 % above."""
    assert expected * (1 - 1e-4) < compute_unit_epsilon(rate, rows, z, steps, 1e-5) < expected * 1.01


@pytest.mark.long
def test_a_unit_of_one_row_costs_what_the_product_s_accountant_says():
    step = Step("poisson", 300, 30, 0.9)
    product = accounting.compute_epsilon({step: 40}, 1e-5, Adjacency.REPLACE_ONE)
    assert product * (1 - 1e-4) < compute_unit_epsilon(0.1, 1, 0.9, 40, 1e-5) < product * 1.01


@pytest.mark.long
def test_noise_for_a_unit_is_less_than_that_of_group_privacy():
    z = noise_for_unit(0.1, 4, 40, 8.0, 1e-5)
    assert 7.9 < compute_unit_epsilon(0.1, 4, z, 40, 1e-5) <= 8
    delta = 1e-5 * math.expm1(2) / math.expm1(8)
    grouped = accounting.compute_epsilon({Step("poisson", 300, 30, z): 40}, delta, Adjacency.REPLACE_ONE)
    assert grouped > 8 / 4  # so group privacy would ask for more noise


@pytest.mark.long
def test_losses_beyond_the_grid_count_as_failures():
    assert compute_unit_epsilon(0.1, 4, 0.05, 40, 1e-5) == math.inf
    few, many = (compute_unit_epsilon(0.1, 4, 3.0, steps, 1e-5) for steps in (40, 160))
    assert few < many < math.inf


def test_claims_are_about_rows_of_the_table():
    settings = runner.read_preset("privacy/unit", "full")["settings"]
    kinds = (unit.CLEAR, unit.ROW, unit.UNIT, unit.BY_ROWS, unit.START)
    rows = {f"{name}, {kind}" for name in settings["data"] for kind in kinds}
    assert {claim[side] for claim in settings["claims"] for side in ("row", "than")} <= rows
