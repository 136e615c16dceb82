"""Methods beside each other on texts: the same federation in process, once a method and seed.

Beside the methods stand "round 0" (the model before any round) and "one client alone" (the client of median size, which
trains in every round on its own rows and shares nothing). With `settings["client"]`, a method that leaves its clients a
model of their own has that client's scores too, as "client_<score>"; without a turn in the run it has none. With
`client = "all"` it has "clients_loss" too, the mean over all clients that have a model.

With `settings["learning_rates"]` every method runs with each of them in every seed, and stands in the table with the
one whose model, or clients' models where they have their own, have the least loss on the validation rows. "one client
alone" takes the run config's.

A method may have keys of the run config of its own (`config`): more rounds, for one that sends half in each.

Every figure has each seed's value (`resampling`); claims of a preset are judged by them, corrected for each other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedveil import rng, strategies, tasks
from fedveil.algebra.factors import aggregation_gap
from fedveil.benchmarks.common import data, resampling, seeds
from fedveil.benchmarks.common import verdicts as common
from fedveil.benchmarks.common.federations import federation
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.run import Options, Outcome, intervals
from fedveil.config import RunConfig, parse
from fedveil.contract.spec import Weights
from fedveil.contract.task import Examples, Rows, Share, Task
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation

_VALIDATION = "validation_loss"


@dataclass(frozen=True)
class _Run:
    """What one federation left behind."""

    scores: Mapping[str, float]
    upload_bytes: int
    download_bytes: int
    seconds: float
    rounds: int = 0


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """The rows "round 0", "one client alone", and one for each of `settings["methods"]`; one run for each seed."""
    answers = seeds.run(__name__, settings, options)
    done = [{name: _Run(**measured) for name, measured in answer.items()} for answer in answers]
    runs = {name: [of_seed[name] for of_seed in done] for name in done[0]}
    figures = {name: figures_of([r.scores for r in measured]) for name, measured in runs.items()}
    rows = [_row(name, measured, figures[name], settings) for name, measured in runs.items()]
    claims = common.table(common.compared(figures, settings.get("claims", [])), len(done))
    return Outcome(rows, [*_verdicts(runs, settings), *claims], [f"this run: {len(done)} seeds"])


def needs(settings: Mapping[str, Any]) -> list[data.Need]:
    """Rows to train and test on, and to choose learning rates on; the base."""
    splits = ("train", "validation", "test") if "learning_rates" in settings else ("train", "test")
    return [data.Need(settings["data"], splits), *data.base(settings)]


def figures_of(scores: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Of every score that all seeds have, a figure with each one's value. Test rows count as given."""
    shared = [name for name in scores[0] if all(name in each for each in scores)]
    return {name: resampling.over_seeds([resampling.fixed(each[name]) for each in scores]) for name in shared}


def _row(name: str, done: list[_Run], figures: Mapping[str, Figure], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "metrics": {metric: resampling.interval(figure) for metric, figure in figures.items()},
        "upload_bytes": round(sum(r.upload_bytes for r in done) / len(done)),
        "download_bytes": round(sum(r.download_bytes for r in done) / len(done)),
        "rounds": done[0].rounds,
        "seconds": round(sum(r.seconds for r in done) / len(done), 1),
    }


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> dict[str, Any]:
    """What `run` asks of each seed."""
    return {name: asdict(measured) for name, measured in _seed(settings, seed, options)}


def _seed(settings: dict[str, Any], seed: int, options: Options) -> list[tuple[str, _Run]]:
    """Every row's run of one seed: the same partition, initial weights and test rows for all."""
    flat = settings["config"] | {"run.seed": seed, "run.deterministic": True}
    out: list[tuple[str, _Run]] = []
    for label, chosen in settings["methods"].items():
        fields = {"method.name": chosen["name"], "method.fields": chosen.get("fields", ""), **chosen.get("config", {})}
        tried: list[tuple[float, _Run]] = []
        for rate in settings.get("learning_rates", [flat["train.learning-rate"]]):
            config = parse(flat | fields | {"train.learning-rate": rate})
            table = _table(settings, config, options)
            if not out:
                out += _without_method(table, flat, options)
            method = strategies.create(config.method.name, config.method.fields)
            done = _federate(Exchange(method, config.method.name, table.task.spec), config, table, table.rows, options)
            tried.append((done.scores.get(_VALIDATION, 0.0), done))
            if len(settings.get("learning_rates", [])) > 1:
                options.say(f"seed {seed}: {label}: rate {rate:g}: validation loss {tried[-1][0]:.3f}")
        out.append((label, least(tried)))
        options.say(f"seed {seed}: {label}: {_brief(out[-1][1].scores)} in {out[-1][1].seconds:.0f} s")
    return out


def least(tried: Sequence[tuple[float, _Run]]) -> _Run:
    """The run of least validation loss; the first of equals. One that is not finite is never the least."""
    return min(tried, key=lambda each: each[0] if math.isfinite(each[0]) else math.inf)[1]


@dataclass(frozen=True)
class _Table:
    """What all runs of a seed share, for one learning rate."""

    settings: Mapping[str, Any]
    task: Task
    rows: Mapping[str, Rows]
    validation: Examples | None
    test: Examples
    initial: Weights

    @property
    def median(self) -> str:
        """The client of median size."""
        return sorted(self.rows, key=lambda site: len(self.rows[site]))[len(self.rows) // 2]


def _table(settings: Mapping[str, Any], config: RunConfig, options: Options) -> _Table:
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, options.device)
    folder, count = data.folder(settings["data"]), settings["clients"]
    rows = {f"client-{i:02d}": task.encode(task.examples(folder, "train", Share(i, count))) for i in range(count)}
    validation = task.examples(folder, "validation") if "learning_rates" in settings else None
    initial = task.initial(rng.initial(config.run.seed, "weights"))
    return _Table(settings, task, rows, validation, task.examples(folder, "test"), initial)


def _without_method(table: _Table, flat: Mapping[str, Any], options: Options) -> list[tuple[str, _Run]]:
    """The rows that no method has: the model before any round, and a client on its own."""
    before = _Run(table.task.evaluate(table.initial, table.test, generate=True), 0, 0, 0.0)
    config = parse({**flat, "cohort.fraction": 1.0, "method.name": "fedavg"})
    exchange = Exchange(strategies.create("fedavg"), "fedavg", table.task.spec)
    alone = _federate(exchange, config, table, {table.median: table.rows[table.median]}, options)
    return [("round 0", before), ("one client alone", alone)]


def _federate(exchange: Exchange, config: RunConfig, table: _Table, rows: Mapping[str, Rows], options: Options) -> _Run:
    started, task, test = time.perf_counter(), table.task, table.test

    def tell(running: Federation, round_: int) -> None:
        if (round_ + 1) % 10 == 0:
            options.say(f"seed {config.run.seed}: {exchange.name}: round {round_ + 1} of {config.run.rounds}")

    done = federation(exchange, config, task, rows, table.initial)
    done.run(tell)
    seconds = time.perf_counter() - started
    server = done.deployed()["server"]
    scores = task.evaluate(server, test, generate=True)
    # Those of the last round: what other sites keep belongs to older weights.
    kept = {site: p.tensors for site in done.last_cohort if (p := done.private.get(site)) is not None}
    pairs = {site: tensors for site, tensors in kept.items() if set(tensors) == set(exchange.spec)}
    if pairs:
        scores["aggregation_gap"] = aggregation_gap(list(pairs.values()), [len(rows[site]) for site in pairs])
    wanted = table.settings.get("client", False)
    sites = list(rows) if wanted == "all" else [table.median] if wanted and table.median in rows else []
    own = {site: model for site in sites if (model := done.deployed(site).get("client"))}
    if table.median in own:
        found = task.evaluate(own[table.median], test, generate=True)
        scores |= {f"client_{name}": score for name, score in found.items()}
    if wanted == "all" and own:
        scores["clients_loss"] = _mean_loss(task, list(own.values()), test)
    if table.validation is not None:
        scores[_VALIDATION] = _mean_loss(task, list(own.values()) or [server], table.validation)
        scores["learning_rate"] = config.train.learning_rate
    return _Run(scores, done.upload_bytes, done.download_bytes, seconds, config.run.rounds)


def _mean_loss(task: Task, models: Sequence[Weights], examples: Examples) -> float:
    return statistics.fmean(task.evaluate(model, examples, generate=False)["loss"] for model in models)


def _verdicts(runs: Mapping[str, list[_Run]], settings: dict[str, Any]) -> list[str]:
    """Sentences from the intervals of ratios, in which each seed is compared with itself."""
    said = []
    against = runs[settings["reference"]]
    for name, done in runs.items():
        if name == settings["reference"]:
            continue
        for metric in settings["compare"]:
            ratios = [
                {"r": mine.scores[metric] / theirs.scores[metric]} for mine, theirs in zip(done, against, strict=True)
            ]
            ratio = intervals(ratios)["r"]
            width = f"95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['n']} seeds"
            width = width if ratio["n"] > 1 else "one seed: no interval"
            said.append(f"{name}: {metric} is {ratio['mean']:.3f} of {settings['reference']}'s ({width}).")
        if done[0].upload_bytes:
            share = sum(r.upload_bytes for r in done) / sum(r.upload_bytes for r in against)
            said.append(f"{name}: uploads are {share:.4f} of {settings['reference']}'s bytes.")
    return said


def _brief(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
