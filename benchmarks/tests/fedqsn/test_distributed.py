"""FedQSN's noise at the site compared with noise in the sum, and the noise of each row."""

from __future__ import annotations

import math

import pytest

from benchmarks.tests.dp_fpl.small import around
from fedveil_bench.fedqsn import distributed
from fedveil_bench.runner import BenchOptions

SETTINGS = {"rows_a_site": 30, "epsilon": 8.0, "fields": "bits = 4"}
DP = {"dp.clip-norm": 1.0, "train.batch-size": 30, "train.max-steps": 1, "run.rounds": 10}


def figures(**values: float) -> dict:
    """By row of two numbers of sites; those that are not named are about 5."""
    names = ["no noise", "at the site", "at the site, noise only", "in the sum", "in the sum, noise only"]
    found = {f"{n} sites, {name}": around(5.001) for n in (5, 30) for name in names} | {"public base": around(5.0)}
    unknown = {name for name in values if name not in found}
    assert not unknown
    return found | {name: around(v) for name, v in values.items()}


def last(**values: float) -> str:
    return distributed.list_verdicts(figures(**values), [5, 30])[-1]


WON, LOST = "A private row stands below its controls.", "Not decided: no private row stands below its controls."


def test_a_private_row_wins_only_below_all_of_its_controls():
    learned = {"30 sites, no noise": 3.0}
    assert last(**learned, **{"30 sites, in the sum": 4.0}) == WON
    assert last(**learned, **{"30 sites, at the site": 4.0}) == WON
    assert last(**learned) == LOST
    assert last(**{"30 sites, in the sum": 4.0}) == LOST  # without noise nothing was learned
    assert last(**learned, **{"30 sites, in the sum": 4.0, "30 sites, in the sum, noise only": 3.999}) == LOST
    assert last(**learned, **{"30 sites, in the sum": 6.0}) == LOST
    assert last(**learned, **{"30 sites, in the sum": 4.0, "public base": 3.999}) == LOST
    assert last(**{"5 sites, no noise": 3.0, "30 sites, in the sum": 4.0}) == LOST  # of other sites


def test_the_sum_is_compared_with_the_site_only_where_something_was_learned():
    said = distributed.list_verdicts(figures(**{"30 sites, no noise": 3.0, "30 sites, in the sum": 4.0}), [5, 30])
    assert any(s.startswith("30 sites, at the site less in the sum") and s.endswith("the sum is better.") for s in said)
    assert "5 sites: noise is not compared, for the row without it does not stand below its controls." in said
    assert not any(s.startswith("5 sites, at the site less") for s in said)


def test_both_kinds_of_noise_are_worth_the_epsilon_and_that_of_the_sum_is_six_per_cent_more():
    summed = {"secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 30, "secure.max-colluders": 10}
    site = distributed._costs(DP, SETTINGS)
    in_sum = distributed._costs(DP | summed, SETTINGS)
    assert site["z"] == pytest.approx(3.797, rel=2e-3)
    assert 1.05 < in_sum["z"] / site["z"] < 1.07
    assert 7.9 < site["epsilon"] <= 8.0
    assert 7.9 < in_sum["epsilon"] <= 8.0
    assert in_sum["epsilon against all"] > 20
    assert site["epsilon against all"] == site["epsilon"]


@pytest.mark.slow
def test_a_whole_small_table(folder):
    settings = SETTINGS | {
        "data": "e2e_nlg", "sites": [3], "rows_a_site": 2, "test_sources": 3, "references": 1, "seeds": 1,
        "config": {
            "task.model": "tiny", "task.max-tokens": 96, "run.rounds": 1, "dp.clip-norm": 1.0, "dp.learning-rate": 1.0,
            "secure.clip-bound": 4.0,
        },
    }  # fmt: skip
    found = distributed.of_seed(settings, 0, BenchOptions(device="cpu"))
    assert list(found)[:3] == ["public base", "3 sites, no noise", "3 sites, at the site"]
    ratio = found["3 sites, at the site"]["noise on the mean"] / found["3 sites, in the sum"]["noise on the mean"]
    assert ratio == pytest.approx(math.sqrt(2) / 1.06, rel=0.05)
    dark = found["3 sites, in the sum, noise only"]["loss"][0]
    assert dark != found["public base"]["loss"][0]
