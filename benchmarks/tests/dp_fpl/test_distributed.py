"""Noise at the site compared with noise in the sum, and the noise of each row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.tests.dp_fpl.small import around, needs_data
from fedveil.config import parse
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil_bench.dp_fpl import distributed, federated_prompts
from fedveil_bench.runner import BenchOptions

FIELDS = "rank = 4\nsampling = 'disjoint'\nclip_global = 1.0\nlearning_rate = 0.3\nadapter = {length = 4}"
SETTINGS = {"fields": FIELDS, "epsilon": 8.0, "local_over_global": 4.0}


def figures(**values: float) -> dict:
    """By row of two numbers of sites; those that are not named are 5."""
    names = ["start", "no noise", "at the site", "at the site, noise only", "in the sum", "in the sum, noise only"]
    found = {f"{n} sites, {name}": around(5.001) for n in (5, 30) for name in names}
    found |= {"zero-shot": around(5.0), "one class": around(5.002)}
    return found | {name.replace("_", " ").replace("sites ", "sites, ", 1): around(v) for name, v in values.items()}


def test_a_private_row_wins_only_above_all_of_its_controls():
    said = distributed.list_verdicts(figures(**{"30 sites in the sum": 9.0, "30 sites no noise": 10.0}), [5, 30])
    assert said[-1] == "A private row stands above its controls."
    assert [s.partition(":")[0] for s in said if s.endswith("above all of them.")] == [
        "30 sites, no noise", "30 sites, in the sum"
    ]  # fmt: skip
    assert "5 sites: noise is not compared, for the row without it does not stand above its controls." in said
    alone = distributed.list_verdicts(figures(**{"30 sites in the sum": 9.0}), [5, 30])
    assert alone[-1] == "Not decided: no private row stands above its controls."
    assert any(s.startswith("30 sites, in the sum less at the site: ") and s.endswith(": higher.") for s in said)
    both = figures(**{"30 sites in the sum": 9.0, "30 sites, in the sum, noise only": 9.001})
    assert distributed.list_verdicts(both, [5, 30])[-1] == "Not decided: no private row stands above its controls."
    always = {"30 sites in the sum": 9.0, "30 sites no noise": 10.0, "one class": 9.002}
    assert distributed.list_verdicts(figures(**always), [5, 30])[-1].startswith("Not decided")
    clear = distributed.list_verdicts(figures(**{"5 sites no noise": 9.0}), [5, 30])
    assert clear[-1] == "Not decided: no private row stands above its controls."
    assert any(s.startswith("5 sites, no noise:") and s.endswith("above all of them.") for s in clear)


def test_both_kinds_of_noise_are_worth_the_epsilon_and_that_of_the_sum_is_six_per_cent_more():
    """Most of it stays at the site: z_L = 4 z_G, so that together they are 0.97 z_G."""
    summed = {"secure.enabled": True, "secure.noise": "sum", "secure.min-sites": 30, "secure.max-colluders": 10}
    flat = {"train.batch-size": 30, "train.max-steps": 1}
    plan = SamplingPlan(10, 1, 30, 30, Adjacency.REPLACE_ONE)
    _, site = distributed._noised(SETTINGS, parse(flat), plan, distributed.SITE)
    method, in_sum = distributed._noised(SETTINGS, parse(flat | summed), plan, distributed.SUM)
    assert site["z"] == pytest.approx(3.797 * math.sqrt(17 / 16), rel=2e-3)
    assert 1.05 < in_sum["z"] / site["z"] < 1.07
    assert (method.noise_local, method.noise_global) == (4 * in_sum["z"], in_sum["z"])
    assert 7.9 < site["epsilon"] <= 8.0
    assert 7.9 < in_sum["epsilon"] <= 8.0
    assert in_sum["epsilon against all"] > 20
    assert site["epsilon against all"] == site["epsilon"]
    quiet, costs = distributed._noised(SETTINGS, parse(flat), plan, distributed.CLEAR)
    assert (quiet.noise_local, quiet.noise_global, costs) == (0.0, 0.0, {})


SMALL = SETTINGS | {
    "data": "cifar10", "classes": 10, "sites": [3], "rows_a_site": 4, "rows_read": 60, "averaged": 2,
    "config": {"task.model": "tiny", "run.rounds": 2, "secure.clip-bound": 1.0},
}  # fmt: skip


@pytest.mark.slow
@needs_data
def test_a_whole_small_table():
    found = distributed.of_seed(SMALL, 0, BenchOptions())
    assert list(found)[:4] == ["zero-shot", "one class", "3 sites, start", "3 sites, no noise"]
    assert all(0 <= row["right"][0] <= 100 for row in found.values())
    assert found["3 sites, in the sum"]["noise on the mean"] < found["3 sites, at the site"]["noise on the mean"]


@pytest.mark.slow
@needs_data
def test_what_is_scored_is_the_mean_of_the_last_rounds_prompts(monkeypatch):
    """Of three rounds the last two; all draws are seeded, so a longer run begins as a shorter one."""
    scored: list[dict] = []

    def right(task, weights, rows):
        scored.append(weights)
        return np.zeros(len(rows))

    monkeypatch.setattr(federated_prompts, "mark_correct", right)
    seeded = SMALL["config"] | {"run.deterministic": True}
    sites = federated_prompts.load_sites({**SMALL, "clients": 3, "config": seeded}, 0, BenchOptions())

    def of(rounds: int, averaged: int) -> dict:
        settings = SMALL | {"averaged": averaged, "config": seeded | {"run.rounds": rounds}}
        distributed._federated(sites, settings, distributed.CLEAR)
        return scored[-1]

    second, third, both = of(2, 1), of(3, 1), of(3, 2)
    assert not torch.equal(second["prompt"], third["prompt"])
    torch.testing.assert_close(both["prompt"], (second["prompt"] + third["prompt"]) / 2)
