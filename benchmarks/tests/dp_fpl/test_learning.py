"""dp_fpl.learning: disjoint rows, the learning rate they select, averaged rounds, controls, and a small full table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.tests.dp_fpl.small import needs_data
from benchmarks.tests.dp_fpl.small import settings as small
from fedveil import strategies
from fedveil.config import parse
from fedveil.contract.privacy import Adjacency, SamplingPlan, Step
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.strategies.dp_fpl import DPFPL
from fedveil_bench.common import seeds
from fedveil_bench.dp_fpl import federated_prompts, learning
from fedveil_bench.runner import BenchOptions


@dataclass(frozen=True)
class Row:
    label: int
    number: int = 0


def test_validation_rows_are_the_site_s_own_and_not_trained_on():
    rows = {"a": [Row(0, i) for i in range(9)], "b": [Row(1, i) for i in range(5)]}
    train, validation = learning.split_rows(rows, 2, 7)
    for site, of_site in rows.items():
        assert len(validation[site]) == 2
        assert sorted(r.number for r in [*train[site], *validation[site]]) == [r.number for r in of_site]
    assert learning.split_rows(rows, 2, 7) == (train, validation)
    assert len({tuple(learning.split_rows(rows, 2, seed)[1]["a"]) for seed in range(9)}) > 3


def test_the_most_frequent_class_of_the_training_rows_is_right_where_it_is_the_row_s():
    assert learning.mark_most_frequent([Row(2), Row(2), Row(1)], [Row(1), Row(2), Row(0), Row(2)]).tolist() == [
        0,
        1,
        0,
        1,
    ]


def test_a_rate_is_that_of_both_prompts():
    row = learning.with_rate({"name": "dp_fpl", "fields": "rank = 2"}, 3e-05, 4)
    made = strategies.create_method(row["name"], row["fields"])
    assert (made.rank, made.learning_rate, made.learning_rate_local, row["averaged"]) == (2, 3e-5, 3e-5, 4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, {"train.learning-rate": 3e-5}), ({"dp.clip-norm": 2.0}, {"dp.clip-norm": 2.0, "dp.learning-rate": 3e-5})],
)
def test_a_baseline_s_rate_is_its_optimiser_s_or_its_noisy_steps(config, expected):
    row = learning.with_rate({"name": "promptfl", "config": config}, 3e-05, 4)
    assert row == {"name": "promptfl", "config": expected, "averaged": 4}
    DpSgdConfig.from_config(parse(row["config"]).dp)  # a rate without a clip would be refused


def test_a_mean_of_models_is_taken_tensor_by_tensor():
    models = [{"prompt": torch.tensor([[1.0, 2.0]])}, {"prompt": torch.tensor([[2.0, 6.0]])}]
    assert federated_prompts.average_models(models)["prompt"].tolist() == [[1.5, 4.0]]


def test_runs_at_several_rates_cost_more_than_the_one_that_is_scored():
    plan = SamplingPlan(4, 1, 10, 10, Adjacency.REPLACE_ONE)
    method = DPFPL(noise_local=5.0, noise_global=5.0, epsilon=99.0)
    done = SimpleNamespace(claim=method, plans=[plan])
    four, twelve = (
        accounting.compute_epsilon({Step("gaussian", 0, 0, 5.0 / math.sqrt(2)): n}, 1e-5, Adjacency.REPLACE_ONE)
        for n in (4, 12)
    )
    assert federated_prompts.epsilon_of(done, 1) == pytest.approx(four)
    assert federated_prompts.epsilon_of(done, 3) == pytest.approx(twelve)
    assert twelve > 1.5 * four
    assert federated_prompts.epsilon_of(SimpleNamespace(claim=None, plans=[]), 3) == math.inf


def test_fewer_sites_have_the_rows_and_classes_of_all():
    rows = {f"s{i}": [Row(i % 3, i), Row(i % 3, 10 + i)] for i in range(6)}
    classes = {f"s{i}": frozenset({i % 3}) for i in range(6)}
    sites = federated_prompts.PromptSites({}, {}, 0, BenchOptions(), rows, classes, [], None)
    two = learning.merge_sites(sites, 2)
    numbers = [[row.number for row in of_site] for of_site in two.rows.values()]
    assert numbers == [[0, 10, 2, 12, 4, 14], [1, 11, 3, 13, 5, 15]]
    assert two.classes == {"s0": frozenset({0, 1, 2}), "s1": frozenset({0, 1, 2})}
    assert learning.merge_sites(sites, 3).classes == {f"s{i}": frozenset({i}) for i in range(3)}
    assert learning.merge_sites(sites, 6) == sites
    for count in (0, 4, 7):
        with pytest.raises(ConfigError, match="divides 6"):
            learning.merge_sites(sites, count)


def fake_sites(rates, test):
    """Sites whose run at a rate names `rates[rate]` of ten validation rows rightly."""
    settings = {"learning_rates": list(rates), "averaged": 3}
    classes = {"a": frozenset({0}), "b": frozenset({1})}
    return SimpleNamespace(
        settings=settings, seed=0, options=BenchOptions(), rows={}, names=["a", "b"], classes=classes, test=test
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("rates", "best"), [({0.1: 3, 0.3: 8, 1.0: 5}, 0.3), ({0.3: 6, 0.1: 6}, 0.1), ({0.1: 2, 1.0: 9}, 1.0)]
)
def test_the_rate_of_most_right_validation_rows_is_scored_on_test_rows_the_least_of_equals(
    rates, best, dark, monkeypatch
):
    test, validation, asked = [Row(0), Row(1)], {site: [Row(0)] * 10 for site in ("a", "b")}, []

    def federate(sites, chosen, rows, is_dark):
        rate = strategies.create_method(chosen["name"], chosen["fields"]).learning_rate
        asked.append((rate, is_dark, chosen["averaged"]))
        models, last = (dict.fromkeys(sites.names, (kind, rate)) for kind in ("mean", "last"))
        return SimpleNamespace(
            task=None, models=models, last=last, costs={}, privacy="none", upload_bytes=7, claim=None, plans=[]
        )

    def right(task, weights, rows):
        kind, rate = weights
        if rows is test:  # worst on test rows where best on validation rows, so a choice by them would show
            return np.array([float(rate != best), 1.0]) if kind == "mean" else np.zeros(2)
        return np.array([1.0] * rates[rate] + [0.0] * (10 - rates[rate]))

    monkeypatch.setattr(federated_prompts, "federate_prompts", federate)
    monkeypatch.setattr(federated_prompts, "mark_correct", right)
    found = learning._best(fake_sites(rates, test), validation, "x", {"name": "dp_fpl"}, dark)
    assert asked == [(rate, dark, 3) for rate in sorted(rates)]
    assert found["learning_rate"] == best
    assert found["figures"][learning.RIGHT][0] == 50.0  # site a: its one row wrong; site b: right
    assert found["figures"][learning.LAST][0] == 0.0
    assert found["costs"] == {}


def answer(local: float, rate: float | None = None) -> dict:
    triple = [local, [local] * 400, 20]
    found: dict = {"figures": {learning.RIGHT: triple}, "costs": {}}
    if rate is not None:
        found["figures"][learning.LAST] = triple
        found |= {"learning_rate": rate, "privacy": "p", "upload_bytes": 3, "seconds": 1.0}
        found["costs"] = {"nominal epsilon": 8.0, "epsilon with the search": math.inf}
    return found


def test_a_table_has_each_seed_s_rate_and_judges_its_claims_together(monkeypatch):
    values = [(60.0, 70.1), (61.0, 71.3), (62.0, 72.2)]
    answers = [{"zero-shot": answer(z), "x": answer(x, 0.1 * i)} for i, (z, x) in enumerate(values)]
    monkeypatch.setattr(seeds, "run_seeds", lambda *of: answers)
    claims = [{"metric": learning.RIGHT, "row": "x", "than": "zero-shot", "is": side} for side in ("higher", "lower")]
    config = {"run.rounds": 2, "train.max-steps": 1, "train.batch-size": 5}
    settings = {"clients": 2, "validation": 4, "averaged": 1, "config": config, "claims": claims}
    outcome = learning.run_benchmark(settings, BenchOptions())
    zero, x = outcome.rows
    assert x["learning_rates"] == [0.0, 0.1, 0.2]
    assert x["metrics"][learning.RIGHT]["seeds"] == [70.1, 71.3, 72.2]
    assert x["metrics"]["nominal epsilon"]["mean"] == 8.0
    assert "epsilon with the search" not in x["metrics"]
    assert "learning_rates" not in zero
    first, second, how = outcome.verdicts
    assert first.startswith("right of x less that of zero-shot: +10.2 [")
    assert first.endswith("it higher: holds here.")
    assert second.endswith("it lower: does not hold here.")
    assert "corrected for 2 comparisons" in how
    assert "3 seeds" in outcome.differences[0]


@pytest.mark.slow
@needs_data
def test_a_whole_small_table():
    fields = "clipped = 'texts'\nadapter = { length = 2 }\nrank = 2\n"
    row = {"name": "dp_fpl", "fields": fields, "epsilon": 50.0, "control": True}
    rows = {"private": row, "one site": {**row, "sites": 1}}
    settings = small(rows) | {"learning_rates": [0.001, 0.1], "validation": 4, "averaged": 2}
    settings["config"] |= {"run.rounds": 2}
    found = learning.of_seed(settings, 0, BenchOptions())
    assert list(found) == [
        "zero-shot",
        "most frequent class",
        *(name + said for name in ("private", "one site") for said in ("", ", noise only")),
    ]
    assert found["one site"]["upload_bytes"] < 0.4 * found["private"]["upload_bytes"]
    assert all(0 <= each["figures"][learning.RIGHT][0] <= 100 for each in found.values())
    private = found["private"]
    assert private["learning_rate"] in (0.001, 0.1)
    assert private["costs"]["nominal epsilon"] == 50.0 < private["costs"]["epsilon with the search"]
