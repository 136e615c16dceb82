"""Compare noise at every site with noise in the sum of all sites, at equal epsilon, for several numbers of sites.

A seed draws `rows_a_site` training images for each site in the largest federation; a smaller federation has the same
total. A round is one step on all of a site's rows, so that sampling does not affect the comparison. Only the shared
prompt is scored, because only this prompt benefits. The score is for its mean over the last `averaged` rounds: from one
round to the next, the prompt moves by more than the rows of the table differ, and averaging published values costs no
epsilon. Rows in a result:

| row | model |
|---|---|
| zero-shot | the unchanged CLIP model, with "a photo of a" before the names: no training |
| one class | the sites' most frequent class, for every image |
| N sites, start | the shared prompt before the first round |
| N sites, no noise | no noise, but gradients are clipped as in the other rows |
| N sites, at the site | every site adds the full noise |
| N sites, in the sum | each of N sites adds a share; the guarantee counts on two thirds of them, rounded up |
| ..., noise only | the same run with every example's gradient set to zero |

| metric | meaning |
|---|---|
| right | percentage correct on the test images, all classes |
| z | standard deviation of the noise on the sum, divided by the clipping bound |
| noise on the mean | norm of the noise on the mean, divided by the clipping bound of one row's share of a site's mean |
| epsilon, epsilon against all | by the accountant: as claimed; against the server and all other sites together |

Accuracies have 95% intervals over test images, paired between rows and averaged over seeds (see `resampling`). They
do not cover the random noise, which is drawn once per seed. If the row without noise is not above its controls, private
rows are not compared.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedveil import rng, strategies
from fedveil.config import RunConfig
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import SamplingPlan
from fedveil.contract.trainer import Trainer
from fedveil.federation.exchange import MessageExchange
from fedveil.models.clip import EncodedImage
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.strategies.dp_fpl import DPFPL
from fedveil_bench.common import noise_tables, resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.federations import create_federation
from fedveil_bench.common.noise_only_trainer import NoiseOnlyTrainer
from fedveil_bench.common.noise_tables import CLEAR, SITE, SUM, name_row
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.dp_fpl import accuracy, federated_prompts
from fedveil_bench.dp_fpl.federated_prompts import PromptSites
from fedveil_bench.runner import BenchOptions, BenchOutcome

ZERO, ONE, START = "zero-shot", "one class", "start"
ABOVE = "above all of them"
_DRAW = "rows"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return the rows for every number of sites, with one run per seed."""
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    figures, rows = noise_tables.rows_of(answers, "right")
    config = settings["config"]
    said = (
        f"this run: {settings['rows_a_site']} rows a site, {config['run.rounds']} rounds of one step on all of them, "
        f"the last {settings['averaged']} averaged, {settings['classes']} classes, epsilon {settings['epsilon']:g}; "
        f"{len(answers)} seeds"
    )
    return BenchOutcome(rows, list_verdicts(figures, settings["sites"]), [said])


def list_verdicts(figures: Mapping[str, ResampledMetric], sites: Sequence[int]) -> list[str]:
    """Judge whether each row is above its controls, and whether noise in the sum is better than noise at the site."""
    found: list[tuple[str, ClaimSentence]] = []
    for count in sites:
        pairs = [(CLEAR, None), *((where, federated_prompts.name_noise_control(where)) for where in (SITE, SUM))]
        for mine, control in pairs:
            others = [ZERO, ONE, name_row(count, START), *([name_row(count, control)] if control else [])]
            less = [resampling.subtract_metrics(figures[name_row(count, mine)], figures[other]) for other in others]
            shown = "; ".join(
                f"less {other}: {resampling.format_interval(resampling.compute_interval(d), '+.1f')}"
                for other, d in zip(others, less, strict=True)
            )
            found.append(
                (f"{name_row(count, mine)}: {shown}", common.all_of(less, "higher", ABOVE, "not told from all"))
            )
        d = resampling.subtract_metrics(figures[name_row(count, SUM)], figures[name_row(count, SITE)])
        shown = resampling.format_interval(resampling.compute_interval(d), "+.1f")
        found.append((f"{name_row(count, SUM)} less {SITE}: {shown}", common.judge_sign(d)))
    return noise_tables.said_of(found, sites, ABOVE, "above", len(figures[ZERO].seeds))


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    most = max(settings["sites"])
    loaded = federated_prompts.load_sites({**settings, "clients": 1}, seed, options)
    pool = [row for rows in loaded.rows.values() for row in rows]
    random.Random(seed).shuffle(pool)
    each = min(settings["rows_a_site"], len(pool) // most)
    parts = {f"site-{i:02d}": pool[i * each : (i + 1) * each] for i in range(most)}
    options.say(f"seed {seed}: {each} rows at each of {most} sites")
    labels = np.array([row.label for row in loaded.test])
    one = np.bincount([row.label for row in pool]).argmax()
    always = {ZERO: loaded.zero_shot(), ONE: (labels == one).astype(float)}
    rows: dict[str, Any] = {name: {"right": _figure(right, loaded)} for name, right in always.items()}
    for count in settings["sites"]:
        sites = replace(loaded, rows=dict(list(parts.items())[:count]))
        for name in (
            START,
            CLEAR,
            SITE,
            federated_prompts.name_noise_control(SITE),
            SUM,
            federated_prompts.name_noise_control(SUM),
        ):
            started = time.perf_counter()
            found = _federated(sites, settings, name)
            row = name_row(count, name)
            rows[row] = {"right": _figure(found.pop("right"), sites), **found}
            options.say(f"seed {seed}: {row}: {rows[row]['right'][0]:.1f}; {time.perf_counter() - started:.0f} s")
    return rows


def _federated(sites: PromptSites, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run one federation; return which predictions of its shared prompt are correct, and its costs."""
    where, dark = name.partition(",")[0], name.endswith("noise only")
    count, each = len(sites.rows), len(next(iter(sites.rows.values())))
    flat = {
        **sites.flat, **settings["config"], "train.batch-size": each, "train.max-steps": 1, "method.name": "dp_fpl",
        "method.params": settings["fields"],
    }  # fmt: skip
    flat |= noise_tables.build_secure_keys(count, where)
    if where == START:
        flat["run.rounds"] = 1
    task = federated_prompts.prompt_task(sites, {"name": "dp_fpl", "fields": settings["fields"], "config": flat})
    plan = SamplingPlan(settings["config"]["run.rounds"], 1, each, each, _plain(settings).neighbours)
    method, costs = _noised(settings, task.config, plan, where)
    exchange = MessageExchange(method, "dp_fpl", task.spec)

    def around(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        return NoiseOnlyTrainer(local) if dark else local

    initial = task.initial(rng.initial_stream(sites.seed, "weights"))
    done = create_federation(exchange, task.config, task, sites.rows, initial, around=around)
    published = deque[Weights](maxlen=settings["averaged"])
    if where == START:
        published.append(done.models()["server"])
    else:
        done.run(lambda running, round_: published.append(running.models()["server"]))
    test: Sequence[EncodedImage] = sites.test
    if "z" in costs:
        entries = sum(math.prod(t.shape) for t in task.spec.values())
        costs["noise on the mean"] = noise_tables.on_the_mean(costs["z"], entries, count, where)
    return {"right": federated_prompts.mark_correct(task, federated_prompts.average_models(published), test), **costs}


def _plain(settings: Mapping[str, Any]) -> DPFPL:
    method = strategies.create_method("dp_fpl", settings["fields"])
    assert isinstance(method, DPFPL), "the preset's fields are DP-FPL's"
    return method


def _noised(
    settings: Mapping[str, Any], config: RunConfig, plan: SamplingPlan, where: str
) -> tuple[Method, dict[str, float]]:
    """Return the method with noise for the preset's epsilon, with most noise on the parts that stay at the site."""
    plain, share = _plain(settings), float(settings["local_over_global"])
    if where in (START, CLEAR):
        return replace(plain, noise_local=0.0, noise_global=0.0), {}

    def noisy(z: float) -> DPFPL:
        return replace(plain, noise_local=share * z, noise_global=z)

    def charges(z: float) -> Any:
        claim = guarantee_of(noisy(z), config)
        assert claim is not None
        return claim.privacy_spent(plan)

    costs = noise_tables.compute_noise_costs(charges, settings["epsilon"], plain.delta, plain.neighbours)
    return noisy(costs["z"]), costs


def _figure(right: Any, sites: PromptSites) -> Any:
    labels = [row.label for row in sites.test]
    return accuracy.compute_accuracy([right], labels, [set(labels)], True).to_json()
