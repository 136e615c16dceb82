"""Noise for a wished epsilon, and what a row really costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.benchmarks.dp_fpl import federated_prompts
from fedveil.benchmarks.run import Options
from fedveil.config import parse
from fedveil.contract.budget import Neighbours, Plan
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.strategies.dp_fpl import DpFpl
from fedveil.strategies.promptfl import PromptFL
from tests.benchmarks.dp_fpl.small import needs_data
from tests.benchmarks.dp_fpl.small import settings as small_settings


@pytest.mark.slow
def test_noise_is_what_the_wished_epsilon_takes_at_the_worst_site():
    plans = [Plan(5, 2, 8, rows, Neighbours.REPLACE_ONE) for rows in (20, 60)]
    method = federated_prompts._with_noise(DpFpl(), 3.0, plans)
    costs, words = federated_prompts._costs(method, plans)
    assert 0.97 * 3 < costs["epsilon, replace-one"] <= 3.0
    assert costs["nominal epsilon"] == 3.0
    assert words.startswith("nominal epsilon 3; epsilon ")
    assert words.endswith("at delta 1e-05 (replace-one)")
    assert accounting.epsilon(method.privacy_spent(plans[1]), 1e-5, Neighbours.REPLACE_ONE) < 2.0
    assert federated_prompts._with_noise(DpFpl(), None, plans) == DpFpl()


def test_only_sites_that_may_cost_most_are_accounted_for():
    """Of sites of 20, 40, 41 and 60 rows, with one epoch: more rows matter where they make more steps."""
    rows = {str(n): [None] * n for n in (60, 20, 41, 40)}
    every, two = (
        federated_prompts._plans(parse({"train.batch-size": 8, "train.max-steps": m, "run.rounds": 2}), rows, method)
        for m, method in ((0, DpFpl(exchange="epoch")), (2, DpFpl(exchange="epoch")))
    )
    assert [(p.steps, p.examples) for p in every] == [(7, 60), (5, 40), (2, 20)]
    assert [(p.steps, p.examples) for p in two] == [(2, 20)]
    (one,) = federated_prompts._plans(parse({"train.batch-size": 8}), rows, DpFpl())
    assert (one.rounds, one.steps, one.examples) == (5, 1, 20)
    assert federated_prompts._plans(parse({}), rows, PromptFL()) == []


def test_the_published_noise_says_both_epsilons_and_a_baseline_none():
    plans = [Plan(100, 1, 32, 64, Neighbours.REPLACE_ONE)]
    costs, words = federated_prompts._costs(DpFpl(mode="code", epsilon=0.4, sampling="disjoint"), plans)
    assert costs["nominal epsilon"] == 0.4
    assert costs["epsilon, replace-one"] > 50
    assert words.endswith("against the server infinite")
    assert federated_prompts._costs(PromptFL(), []) == ({}, "epsilon infinite: no claim")
    quiet = DpFpl(noise_local=0.0)
    assert federated_prompts._costs(quiet, plans)[0]["epsilon, replace-one"] == math.inf
    with pytest.raises(ConfigError, match="privacy budget"):
        federated_prompts._with_noise(PromptFL(), 1.0, [])


@needs_data
def test_classes_that_a_preset_calls_by_one_name_are_one():
    pairs = {"cat": "animal", "dog": "animal", "deer": "animal", "ship": "vehicle", "truck": "vehicle"}
    settings = small_settings({}) | {"data": "cifar10", "clients": 1, "called": pairs, "classes": 7, "rows_read": 200}
    found = federated_prompts.load(settings, 0, Options())
    assert sorted(found.task.names) == ["airplane", "animal", "automobile", "bird", "frog", "horse", "vehicle"]
    (rows,) = found.rows.values()
    shares = np.bincount([row.label for row in rows], minlength=7) / len(rows)
    assert shares[found.task.names.index("animal")] > 0.2 > shares[found.task.names.index("vehicle")] > 0.12
