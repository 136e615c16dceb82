"""FedQSN's noisy steps at one epsilon: noise at every site beside noise in the sum, at several numbers of sites.

A seed takes `rows_a_site` training rows for each of the most sites, at random, and every number of sites uses as many
of them. A round is one step on all of a site's rows, so that no sampling hides in the comparison. Rows of a result:

| row | which model |
|---|---|
| public base | W_0: what everybody has |
| N sites, no noise | rows' gradients are clipped as in the others |
| N sites, at the site | every site adds all of the noise |
| N sites, in the sum | each of N sites adds a share; two thirds of them, rounded up, are counted on |
| ..., noise only | the same run with every row's gradient set to zero |

| metric | what |
|---|---|
| loss | nats a token of the server's model, on test rows |
| z | noise on what is summed over the clipping bound, wherever it is |
| noise on the mean | norm of the noise on the mean gradient, over the clipping bound of a row |
| epsilon, epsilon against all | by the accountant: as claimed; against the server and all other sites together |

Losses have 95 % intervals over test sources, paired between rows and averaged over seeds, see `resampling`. They do not
cover the draws of the noise, of which each seed has one. Where the row without noise does not stand below the base,
private rows are not compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil import rng, strategies
from fedveil.adapters.all_weights import AllWeights
from fedveil.benchmarks.common import data, resampling, seeds, texts
from fedveil.benchmarks.common.federations import federation, task_of
from fedveil.benchmarks.common.forwarding import Dark
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.run import Options, Outcome
from fedveil.config import RunConfig, parse
from fedveil.contract.budget import Neighbours, Plan
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Weights
from fedveil.contract.task import Example, Rows
from fedveil.contract.trainer import Trainer
from fedveil.federation.exchange import Exchange
from fedveil.privacy import accounting
from fedveil.privacy.claims import claim_of
from fedveil.tasks.text_generation import TextGeneration

BASE, CLEAR, SITE, SUM = "public base", "no noise", "at the site", "in the sum"
ONLY = "noise only"
_METHOD = "fedqsn"


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every number of sites, one run for each seed."""
    answers: list[dict[str, Any]] = seeds.run(__name__, settings, options)
    figures = {
        name: resampling.over_seeds([Figure.from_json(answer[name]["loss"]) for answer in answers])
        for name in answers[0]
    }
    rows = []
    for name, figure in figures.items():
        metrics = {"loss": resampling.interval(figure)}
        metrics |= {k: resampling.interval(resampling.fixed(v)) for k, v in answers[0][name].items() if k != "loss"}
        rows.append({"name": name, "metrics": metrics})
    said = (
        f"this run: {settings['rows_a_site']} rows a site, {settings['config']['run.rounds']} rounds of one step on "
        f"all of them, epsilon {settings['epsilon']:g}; {len(answers)} seeds"
    )
    return Outcome(rows, verdicts(figures, settings["sites"]), [said])


def verdicts(figures: Mapping[str, Figure], sites: Sequence[int]) -> list[str]:
    """Whether each row stands below its controls, and the noise in the sum below that at the site."""
    found, won = [], False
    for count in sites:
        learned = False
        for mine in (CLEAR, SITE, SUM):
            controls = [BASE] if mine == CLEAR else [BASE, label(count, f"{mine}, {ONLY}")]
            told = [resampling.difference(figures[c], figures[label(count, mine)]) for c in controls]
            below = all(resampling.told(d) == "higher" for d in told)
            learned = below if mine == CLEAR else learned
            won = won or (below and learned and mine != CLEAR)
            shown = "; ".join(
                f"{c} less it: {resampling.shown(d, '+.2f')}" for c, d in zip(controls, told, strict=True)
            )
            found.append(
                f"{label(count, mine)}: {shown}: {'below all of them' if below else 'not told apart from all'}."
            )
        if not learned:
            found.append(f"{count} sites: noise is not compared, for the row without it does not stand below the base.")
            continue
        d = resampling.difference(figures[label(count, SITE)], figures[label(count, SUM)])
        found.append(
            f"{label(count, SITE)} less {SUM}, loss: {resampling.shown(d, '+.2f')}: "
            f"{resampling.told(d, 'the site is better', 'the sum is better')}."
        )
    last = (
        "A private row stands below its controls." if won else "Not decided: no private row stands below its controls."
    )
    return [*found, last]


def label(count: int, name: str) -> str:
    """A row's name."""
    return f"{count} sites, {name}"


@dataclass(frozen=True)
class _Seed:
    """What the rows of one seed share."""

    settings: Mapping[str, Any]
    number: int
    parts: Mapping[str, list[texts.Row]]
    test: Sequence[texts.Row]
    options: Options


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    """What `run` asks of each seed."""
    train, each, most = texts.rows(settings["data"], "train"), settings["rows_a_site"], max(settings["sites"])
    random.Random(seed).shuffle(train)
    parts = {f"site-{i:02d}": train[i * each : (i + 1) * each] for i in range(most)}
    test = texts.chosen(texts.rows(settings["data"], "test"), settings["test_sources"], settings["references"], seed)
    found = _Seed(settings, seed, parts, test, options)
    task, base = _task(found, _flat(found, 1, CLEAR))
    rows: dict[str, Any] = {BASE: {"loss": texts.loss(task, base, test, seed).to_json()}}
    for count in settings["sites"]:
        for name in (CLEAR, SITE, f"{SITE}, {ONLY}", SUM, f"{SUM}, {ONLY}"):
            started = time.perf_counter()
            rows[label(count, name)] = _federated(found, count, name)
            loss, seconds = rows[label(count, name)]["loss"][0], time.perf_counter() - started
            options.say(f"seed {seed}: {label(count, name)}: loss {loss:.3f}; {seconds:.0f} s")
    return rows


def _flat(found: _Seed, count: int, where: str) -> dict[str, Any]:
    flat = {
        **found.settings["config"], "run.seed": found.number, "train.batch-size": found.settings["rows_a_site"],
        "train.max-steps": 1, "method.name": _METHOD, "method.fields": found.settings["fields"],
    }  # fmt: skip
    if where == SUM:
        flat |= {"secure.enabled": True, "secure.noise": "sum", "secure.min-sites": count}
        flat["secure.colluding"] = count - math.ceil(2 * count / 3)
    return data.with_model(flat)


def _task(found: _Seed, flat: Mapping[str, Any]) -> tuple[TextGeneration, Weights]:
    task = task_of(TextGeneration, parse(flat), found.options, AllWeights())
    return task, task.initial(rng.initial(found.number, "weights"))


def _federated(found: _Seed, count: int, name: str) -> dict[str, Any]:
    """One run: the loss of its server's model, and its costs."""
    where, dark = name.partition(",")[0], name.endswith(ONLY)
    flat = _flat(found, count, where)
    costs: dict[str, float] = {}
    if where != CLEAR:
        costs = _costs(flat, found.settings, count if where == SUM else 1)
        flat |= {"dp.noise": costs["z"]}
    task, base = _task(found, flat)
    exchange = Exchange(strategies.create(_METHOD, found.settings["fields"]), _METHOD, task.spec)
    rows: dict[str, Rows] = {site: task.encode(Example.of(r)) for site, r in list(found.parts.items())[:count]}

    def around(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        return Dark(local) if dark else local

    done = federation(exchange, parse(flat), task, rows, base, around=around)
    done.run()
    if costs:
        entries, each = sum(math.prod(t.shape) for t in task.spec.values()), found.settings["rows_a_site"]
        honest = math.ceil(2 * count / 3) if where == SUM else 1
        costs["noise on the mean"] = costs["z"] * math.sqrt(entries / count / honest) / each
    return {"loss": texts.loss(task, done.deployed()["server"], found.test, found.number).to_json(), **costs}


def _costs(flat: Mapping[str, Any], settings: Mapping[str, Any], sites: int) -> dict[str, float]:
    """The noise that the preset's epsilon takes, and what is spent with it."""
    method, each = strategies.create(_METHOD, settings["fields"]), settings["rows_a_site"]
    config: RunConfig = parse(flat)
    relation, delta = Neighbours(config.dp.neighbours), config.dp.delta
    plan = Plan(config.run.rounds, 1, each, each, relation)

    def spent(z: float) -> Any:
        claim = claim_of(method, parse({**flat, "dp.noise": z}))
        assert claim is not None, "dp.clip is set"
        return claim.privacy_spent(plan)

    z = accounting.multiplier_for(spent, settings["epsilon"], delta, relation)
    found = {"z": z, "epsilon": accounting.epsilon(spent(z), delta, relation)}
    alone = accounting.epsilon(accounting.against_all(spent(z)), delta, relation) if sites > 1 else math.inf
    return found | ({"epsilon against all": alone} if alone < math.inf else {})
