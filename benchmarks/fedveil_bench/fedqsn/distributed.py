"""Compare noise at every site with noise in the sum for FedQSN, at equal epsilon, for several numbers of sites.

A seed draws `rows_a_site` training rows for each site in the largest federation; a smaller federation has the same
total. A round is one step on all of a site's rows, so that sampling does not affect the comparison. Rows in a result:

| row | model |
|---|---|
| public base | W_0, which everyone has |
| N sites, no noise | no noise, but gradients are clipped as in the other rows |
| N sites, at the site | every site adds the full noise |
| N sites, in the sum | each of N sites adds a share; the guarantee counts on two thirds of them, rounded up |
| ..., noise only | the same run with every example's gradient set to zero |

| metric | meaning |
|---|---|
| loss | nats per token of the server's model, on test rows |
| z | standard deviation of the noise on the sum, divided by the clipping bound |
| noise on the mean | norm of the noise on the mean gradient, divided by the clipping bound of a row |
| epsilon, epsilon against all | by the accountant: as claimed; against the server and all other sites together |

Losses have 95% intervals over test sources and seeds, paired between rows (see `resampling`); each seed draws its own
noise. If the loss without noise is not below the base's, private rows are not compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil import rng, strategies
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil.contract.task import Example, Rows
from fedveil.contract.trainer import Trainer
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.tasks.text_generation import TextGeneration
from fedveil_bench.common import data, noise_tables, resampling, seeds, texts
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.common.noise_only_trainer import NoiseOnlyTrainer
from fedveil_bench.common.noise_tables import CLEAR, ONLY, SITE, SUM, name_row
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.runner import BenchOptions, BenchOutcome

BASE = "public base"
BELOW = "below all of them"
_METHOD = "fedqsn"


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: rows for training and testing, and the base."""
    return [texts.require_splits(settings["data"], "train", "test"), *data.list_base_requirements(settings)]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return the rows for every number of sites, with one run per seed."""
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    figures, rows = noise_tables.rows_of(answers, "loss")
    said = (
        f"this run: {settings['rows_a_site']} rows a site, {settings['config']['run.rounds']} rounds of one step on "
        f"all of them, epsilon {settings['epsilon']:g}; {len(answers)} seeds"
    )
    return BenchOutcome(rows, list_verdicts(figures, settings["sites"]), [said])


def list_verdicts(figures: Mapping[str, ResampledMetric], sites: Sequence[int]) -> list[str]:
    """Judge whether each row's loss is below its controls', and whether noise in the sum beats noise at the site."""
    found: list[tuple[str, ClaimSentence]] = []
    for count in sites:
        for mine in (CLEAR, SITE, SUM):
            controls = [BASE] if mine == CLEAR else [BASE, name_row(count, f"{mine}, {ONLY}")]
            less = [resampling.subtract_metrics(figures[c], figures[name_row(count, mine)]) for c in controls]
            shown = "; ".join(
                f"{c} less it: {resampling.format_interval(resampling.compute_interval(d), '+.2f')}"
                for c, d in zip(controls, less, strict=True)
            )
            found.append(
                (f"{name_row(count, mine)}: {shown}", common.all_of(less, "higher", BELOW, "not told from all"))
            )
        d = resampling.subtract_metrics(figures[name_row(count, SITE)], figures[name_row(count, SUM)])
        interval = resampling.format_interval(resampling.compute_interval(d), "+.2f")
        text = f"{name_row(count, SITE)} less {SUM}, loss: {interval}"
        found.append((text, common.judge_sign(d, "the site is better", "the sum is better")))
    return noise_tables.said_of(found, sites, BELOW, "below", len(figures[BASE].seeds))


@dataclass(frozen=True)
class _Seed:
    """The parts that all rows of a seed share."""

    settings: Mapping[str, Any]
    number: int
    parts: Mapping[str, list[texts.Row]]
    test: Sequence[texts.Row]
    options: BenchOptions


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    train, each, most = texts.load_rows(settings["data"], "train"), settings["rows_a_site"], max(settings["sites"])
    random.Random(seed).shuffle(train)
    parts = {f"site-{i:02d}": train[i * each : (i + 1) * each] for i in range(most)}
    test = texts.select_rows(
        texts.load_rows(settings["data"], "test"), settings["test_sources"], settings["references"], seed
    )
    found = _Seed(settings, seed, parts, test, options)
    task, base = _task(found, _flat(found, 1, CLEAR))
    rows: dict[str, Any] = {BASE: {"loss": texts.compute_loss(task, base, test).to_json()}}
    for count in settings["sites"]:
        for name in (CLEAR, SITE, f"{SITE}, {ONLY}", SUM, f"{SUM}, {ONLY}"):
            started = time.perf_counter()
            rows[name_row(count, name)] = _federated(found, count, name)
            loss, seconds = rows[name_row(count, name)]["loss"][0], time.perf_counter() - started
            options.say(f"seed {seed}: {name_row(count, name)}: loss {loss:.3f}; {seconds:.0f} s")
    return rows


def _flat(found: _Seed, count: int, where: str) -> dict[str, Any]:
    flat = {
        **found.settings["config"], "run.seed": found.number, "train.batch-size": found.settings["rows_a_site"],
        "train.max-steps": 1, "method.name": _METHOD, "method.params": found.settings["fields"],
    }  # fmt: skip
    return data.with_model(flat | noise_tables.build_secure_keys(count, where))


def _task(found: _Seed, flat: Mapping[str, Any]) -> tuple[TextGeneration, Weights]:
    task = task_of(TextGeneration, parse(flat), found.options, AllWeightsAdapter())
    return task, task.initial(rng.initial_stream(found.number, "weights"))


def _federated(found: _Seed, count: int, name: str) -> dict[str, Any]:
    """Run one federation; return the loss of the server's model, and the costs."""
    where, dark = name.partition(",")[0], name.endswith(ONLY)
    flat = _flat(found, count, where)
    costs: dict[str, float] = {}
    if where != CLEAR:
        costs = _costs(flat, found.settings)
        flat |= {"dp.noise-multiplier": costs["z"]}
    task, base = _task(found, flat)
    exchange = MessageExchange(strategies.create_method(_METHOD, found.settings["fields"]), _METHOD, task.spec)
    rows: dict[str, Rows] = {
        site: task.encode(Example.from_columns(r)) for site, r in list(found.parts.items())[:count]
    }

    def around(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        return NoiseOnlyTrainer(local) if dark else local

    done = create_federation(exchange, parse(flat), task, rows, base, around=around)
    done.run()
    if costs:
        entries = sum(math.prod(t.shape) for t in task.spec.values())
        of_sums = noise_tables.on_the_mean(costs["z"], entries, count, where)
        costs["noise on the mean"] = of_sums / found.settings["rows_a_site"]
    return {"loss": texts.compute_loss(task, done.models()["server"], found.test).to_json(), **costs}


def _costs(flat: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the noise for the preset's epsilon, and the resulting privacy cost."""
    method, each = strategies.create_method(_METHOD, settings["fields"]), settings["rows_a_site"]
    config: RunConfig = parse(flat)
    relation, delta = Adjacency(config.dp.adjacency), config.dp.delta
    plan = SamplingPlan(config.run.rounds, 1, each, each, relation)

    def spent(z: float) -> Any:
        claim = guarantee_of(method, parse({**flat, "dp.noise-multiplier": z}))
        assert claim is not None, "dp.clip-norm is set"
        return claim.privacy_spent(plan)

    return noise_tables.compute_noise_costs(spent, settings["epsilon"], delta, relation)
