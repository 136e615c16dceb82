"""Statements of lora/canaries about its rows: it reports contradictions, and takes its claim from the site's ledger."""

from __future__ import annotations

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil_bench import runner
from fedveil_bench.common import noise_tables
from fedveil_bench.lora import canaries

SETTINGS = runner.read_preset("lora/canaries", "full")["settings"]


def config_of(name: str, **changes: object):
    row = SETTINGS["rows"][name]
    return parse(SETTINGS["config"] | row.get("config", {}) | {"method.name": row["name"], **changes})


def at_most(name: str, rows: int = 200, **changes: object) -> dict[str, float]:
    config = config_of(name, **changes)
    return canaries._at_most(config, strategies.create_method(config.method.name), rows)


def test_a_bound_above_the_claim_is_said():
    kept = {"a": {"shown": 1.0, "at most": 2.0}, "b": {"shown": 9.0}}
    broken = {"a": {"shown": 2.5, "at most": 2.0}, "b": {"shown": 9.0}}
    assert canaries._contradictions([kept, kept]) == ["a: epsilon at most 2.00; shown 1.00 at most: not contradicted."]
    (said,) = canaries._contradictions([kept, broken])
    assert said == "a: epsilon at most 2.00; shown 2.50 at most: CONTRADICTED on 1 of 2 seeds: do not rely on it."


@pytest.mark.long
def test_what_is_claimed_is_what_a_site_is_charged():
    config = config_of("FedAvg, noisy steps")
    assert at_most("FedAvg, noisy steps") == {
        "at most": noise_tables.epsilon_of(DpSgdConfig.from_config(config.dp), config, 200)
    }
    assert at_most("FedAvg") == {}
    assert at_most("FedAvg, clipped alone") == {}  # a claim of infinity has no mean over seeds


def test_noise_in_the_sum_is_claimed_of_the_sum():
    """One step a round, with the whole noise: more of it claims less."""
    one, more = (at_most("FedAvg, noise in the sum", **{"dp.noise-multiplier": z})["at most"] for z in (1.0, 2.0))
    assert 0 < more < one


@pytest.mark.parametrize("name", SETTINGS["rows"])
def test_every_row_is_a_run_that_the_code_permits(name):
    config_of(name, **{"run.deterministic": True})
    strategies.create_method(SETTINGS["rows"][name]["name"])


def test_claims_are_about_rows_of_the_table():
    for claim in SETTINGS["claims"]:
        assert {claim["row"], *([claim["than"]] if isinstance(claim["than"], str) else [])} <= set(SETTINGS["rows"])
