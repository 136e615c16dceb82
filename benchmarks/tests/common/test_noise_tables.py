from __future__ import annotations

import math

import pytest

from benchmarks.tests.dp_fpl.small import around
from fedveil.config import parse
from fedveil_bench.common import noise_tables
from fedveil_bench.common.noise_tables import CLEAR, SITE, SUM


@pytest.mark.parametrize("count,honest", [(3, 2), (5, 4), (10, 7), (30, 20)])
def test_two_thirds_of_a_sum_are_counted_on_and_the_run_config_says_so(count, honest):
    assert noise_tables.count_honest(count, SUM) == honest
    assert parse(noise_tables.build_secure_keys(count, SUM)).secure.honest == honest
    assert noise_tables.build_secure_keys(count, SITE) == noise_tables.build_secure_keys(count, CLEAR) == {}


def test_the_noise_of_a_mean():
    """d entries of deviation z at each of N sites; of a sum of N, z over the root of its honest ones at each."""
    assert noise_tables.on_the_mean(3.0, 400, 25, SITE) == pytest.approx(3.0 * 20 / 5)
    assert noise_tables.on_the_mean(3.0, 400, 25, SUM) == pytest.approx(3.0 * 20 / 5 / math.sqrt(17))


def test_a_row_has_its_score_over_seeds_and_its_costs():
    answers = [{"a": {"loss": around(v).to_json(), "z": 2.5}} for v in (1.0, 3.0)]
    figures, rows = noise_tables.rows_of(answers, "loss")
    assert figures["a"].value == pytest.approx(2.0)
    assert rows[0]["name"] == "a"
    assert rows[0]["metrics"]["loss"]["mean"] == pytest.approx(2.0)
    assert rows[0]["metrics"]["z"]["mean"] == 2.5


def test_an_epsilon_of_seeded_noise_says_so():
    dp = parse({"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0, "dp.delta": 1e-4}).dp
    assert noise_tables.name_epsilon_column(dp) == "epsilon at delta 0.0001 (replace-one), were its noise not seeded"
