"""The noise for a target epsilon, and the true cost of a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from benchmarks.tests.dp_fpl.small import needs_data
from benchmarks.tests.dp_fpl.small import settings as small_settings
from fedveil import rng
from fedveil.config import parse
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil.errors import ConfigError
from fedveil.models.clip import EncodedImage
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.strategies.dp_fpl import DPFPL
from fedveil.strategies.promptfl import PromptFL
from fedveil_bench.dp_fpl import federated_prompts
from fedveil_bench.runner import BenchOptions

PLANS = [SamplingPlan(5, 2, 8, rows, Adjacency.REPLACE_ONE) for rows in (20, 60)]
PLAIN = parse({})
STEPS = parse({"method.name": "promptfl", "dp.clip-norm": 2.0, "dp.learning-rate": 0.5})


@pytest.mark.slow
def test_noise_is_what_the_wished_epsilon_takes_at_the_worst_site():
    method, config = federated_prompts._with_noise(DPFPL(), PLAIN, 3.0, PLANS)
    costs, words = federated_prompts._costs(method, PLANS)
    assert 0.97 * 3 < costs["epsilon, replace-one"] <= 3.0
    assert costs["nominal epsilon"] == 3.0
    assert words.startswith("nominal epsilon 3; epsilon ")
    assert words.endswith("at delta 1e-05 (replace-one)")
    assert accounting.compute_epsilon(method.privacy_spent(PLANS[1]), 1e-5, Adjacency.REPLACE_ONE) < 2.0
    assert config is PLAIN
    assert federated_prompts._with_noise(DPFPL(), PLAIN, None, PLANS) == (DPFPL(), PLAIN)


def test_a_baseline_s_noise_is_what_the_same_epsilon_takes_and_grows_as_it_falls():
    """At most ten steps of all rows: a Gaussian of z / sqrt(10), and a replaced row moves the sum by 2 C.

    A baseline has one release a step; DP-FPL's two are worth one of z / sqrt(2) together.
    """
    found, plans = {}, [SamplingPlan(5, steps, 20, 20, Adjacency.REPLACE_ONE) for steps in (1, 2)]
    for wished in (8.0, 3.0):
        method, config = federated_prompts._with_noise(PromptFL(), STEPS, wished, plans)
        assert method == PromptFL()
        assert (config.dp.clip_norm, config.dp.learning_rate, config.dp.epsilon) == (2.0, 0.5, wished)
        by_hand = get_epsilon_gaussian(config.dp.noise_multiplier / 10**0.5 / 2, 1e-5)
        costs, words = federated_prompts._costs(guarantee_of(method, config), plans)
        assert costs == {"nominal epsilon": wished, "epsilon, replace-one": pytest.approx(by_hand)}
        assert 0.99 * wished < by_hand <= wished
        assert words.startswith(f"nominal epsilon {wished:g}; epsilon ")
        assert words.endswith(" at delta 1e-05 (replace-one)")
        found[wished] = config.dp.noise_multiplier
    prompts, _ = federated_prompts._with_noise(DPFPL(exchange="epoch"), PLAIN, 3.0, plans)
    assert found[3.0] == pytest.approx(prompts.noise_local / 2**0.5, rel=0.003)
    assert found[3.0] > 1.5 * found[8.0]


def test_only_sites_that_may_cost_most_are_accounted_for():
    """Of sites of 20, 40, 41 and 60 rows, with one epoch: more rows matter where they make more steps."""
    rows = {str(n): [None] * n for n in (60, 20, 41, 40)}
    asked = {"train.batch-size": 8, "run.rounds": 2}
    for method, dp in ((DPFPL(exchange="epoch"), {}), (PromptFL(), {"dp.clip-norm": 1.0})):
        every, two = (
            federated_prompts._plans(parse({**asked, **dp, "train.max-steps": most}), rows, method) for most in (0, 2)
        )
        assert [(p.steps, p.examples) for p in every] == [(7, 60), (5, 40), (2, 20)]
        assert [(p.steps, p.examples) for p in two] == [(2, 20)]
    (one,) = federated_prompts._plans(parse({"train.batch-size": 8}), rows, DPFPL())
    assert (one.rounds, one.steps, one.examples) == (5, 1, 20)
    assert federated_prompts._plans(parse({}), rows, PromptFL()) == []


def test_the_published_noise_says_both_epsilons_and_a_baseline_without_noise_none():
    plans = [SamplingPlan(100, 1, 32, 64, Adjacency.REPLACE_ONE)]
    costs, words = federated_prompts._costs(DPFPL(mode="code", epsilon=0.4, sampling="disjoint"), plans)
    assert costs["nominal epsilon"] == 0.4
    assert costs["epsilon, replace-one"] > 50
    assert words.endswith("against the server infinite")
    assert federated_prompts._costs(None, []) == ({}, "epsilon infinite: no claim")
    for quiet in (DPFPL(noise_local=0.0), guarantee_of(PromptFL(), STEPS)):
        assert federated_prompts._costs(quiet, plans)[0]["epsilon, replace-one"] == math.inf
    with pytest.raises(ConfigError, match="dp.clip-norm, found PromptFL without"):
        federated_prompts._with_noise(PromptFL(), PLAIN, 1.0, [])


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ({"name": "fedotp", "config": {"dp.clip-norm": 1.0}}, "no per-example gradients"),
        ({"name": "dp_fpl", "config": {"dp.clip-norm": 1.0}}, "which adds its own noise"),
    ],
)
def test_noisy_steps_are_refused_where_a_row_has_no_gradients_or_noise_of_its_own(row, refused):
    with pytest.raises(ConfigError, match=refused):
        federated_prompts.federate_prompts(one_site(), row, {}, False)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("promptfl", ""), ("fedotp", ", form = 'sum'"), ("fedpgp", ", form = 'factored', rank = 1, contrast = 0.0")],
)
def test_a_baseline_trains_by_noisy_steps_and_its_control_sees_no_row(name, adapter):
    """Clipping without noise: the control stays where it began, and the row goes elsewhere by at most the clip."""
    config = {"dp.clip-norm": 0.01, "dp.learning-rate": 0.5}
    row = {"name": name, "fields": f"adapter = {{ length = 2{adapter} }}", "config": config}
    sites = one_site()
    rows = {"site-00": [EncodedImage(p[None] / p.norm(), i % 3) for i, p in enumerate(torch.eye(64)[:4])]}
    seen, dark = (federated_prompts.federate_prompts(sites, row, rows, dark) for dark in (False, True))
    start = seen.task.initial(rng.initial_stream(0, "weights"))["prompt"]
    assert torch.equal(dark.models["site-00"]["prompt"], start)
    moved = float((seen.models["site-00"]["prompt"] - start).norm())
    assert 0 < moved <= 0.5 * 0.01 * 2 * 1.001  # two steps of all rows
    assert seen.claim == DpSgdConfig(0.01, 0.0, 0.5)
    assert seen.costs["epsilon, replace-one"] == math.inf


def one_site() -> federated_prompts.PromptSites:
    flat = {
        "task.name": "clip-prompt", "task.model": "tiny", "task.class-names": "cat,dog,horse", "run.rounds": 1,
        "train.batch-size": 4, "train.max-steps": 2, "train.epochs": 2,
    }  # fmt: skip
    return federated_prompts.PromptSites({}, flat, 0, BenchOptions(), {}, {}, [], None)


@needs_data
def test_classes_that_a_preset_calls_by_one_name_are_one():
    pairs = {"cat": "animal", "dog": "animal", "deer": "animal", "ship": "vehicle", "truck": "vehicle"}
    settings = small_settings({}) | {"data": "cifar10", "clients": 1, "called": pairs, "classes": 7, "rows_read": 200}
    found = federated_prompts.load_sites(settings, 0, BenchOptions())
    assert sorted(found.task.names) == ["airplane", "animal", "automobile", "bird", "frog", "horse", "vehicle"]
    (rows,) = found.rows.values()
    shares = np.bincount([row.label for row in rows], minlength=7) / len(rows)
    assert shares[found.task.names.index("animal")] > 0.2 > shares[found.task.names.index("vehicle")] > 0.12
