"""Methods beside each other on texts: the same federation in process, once a method and seed.

Beside the methods stand "round 0" (the model before any round) and "one client alone" (the client of median size, which
trains in every round on its own rows and shares nothing). With `settings["client"]`, a method that leaves its clients a
model of their own has that client's scores too, as "client_<score>"; without a turn in the run it has none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedveil import rng, strategies, tasks
from fedveil.algebra.factors import aggregation_gap
from fedveil.benchmarks.common import data, seeds
from fedveil.benchmarks.common.federations import federation
from fedveil.benchmarks.run import Options, Outcome, intervals
from fedveil.config import RunConfig, parse
from fedveil.contract.spec import Weights
from fedveil.contract.task import Examples, Rows, Share, Task
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation


@dataclass(frozen=True)
class _Run:
    """What one federation left behind."""

    scores: Mapping[str, float]
    upload_bytes: int
    download_bytes: int
    seconds: float


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """The rows "round 0", "one client alone", and one for each of `settings["methods"]`; one run for each seed."""
    answers = seeds.run(__name__, settings, options)
    done = [{name: _Run(**measured) for name, measured in answer.items()} for answer in answers]
    runs = {name: [of_seed[name] for of_seed in done] for name in done[0]}
    rows = [_row(name, measured, settings) for name, measured in runs.items()]
    return Outcome(rows, _verdicts(runs, settings))


def _row(name: str, done: list[_Run], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "metrics": intervals([r.scores for r in done]),
        "upload_bytes": round(sum(r.upload_bytes for r in done) / len(done)),
        "download_bytes": round(sum(r.download_bytes for r in done) / len(done)),
        "rounds": 0 if name == "round 0" else settings["config"]["run.rounds"],
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
        config = parse(flat | {"method.name": chosen["name"], "method.fields": chosen.get("fields", "")})
        method = strategies.create(config.method.name, config.method.fields)
        task = tasks.load(config, method.adapter, options.device)
        folder = data.folder(settings["data"])
        rows = {
            f"client-{i:02d}": task.encode(task.examples(folder, "train", Share(i, settings["clients"])))
            for i in range(settings["clients"])
        }
        test = task.examples(folder, "test")
        exchange = Exchange(method, config.method.name, task.spec)
        initial = task.initial(rng.initial(seed, "weights"))
        median = sorted(rows, key=lambda site: len(rows[site]))[len(rows) // 2]
        if not out:
            out.append(("round 0", _Run(task.evaluate(initial, test, generate=True), 0, 0, 0.0)))
            alone = parse(flat | {"cohort.fraction": 1.0, "method.name": "fedavg"})
            single = Exchange(strategies.create("fedavg"), "fedavg", task.spec)
            out.append(
                ("one client alone", _federate(single, alone, task, {median: rows[median]}, initial, test, options))
            )
        own = median if settings.get("client") else ""
        out.append((label, _federate(exchange, config, task, rows, initial, test, options, own)))
        options.say(f"seed {seed}: {label}: {_brief(out[-1][1].scores)} in {out[-1][1].seconds:.0f} s")
    return out


def _federate(
    exchange: Exchange,
    config: RunConfig,
    task: Task,
    rows: Mapping[str, Rows],
    initial: Weights,
    test: Examples,
    options: Options,
    own: str = "",
) -> _Run:
    started = time.perf_counter()

    def tell(running: Federation, round_: int) -> None:
        if (round_ + 1) % 10 == 0:
            options.say(f"seed {config.run.seed}: {exchange.name}: round {round_ + 1} of {config.run.rounds}")

    done = federation(exchange, config, task, rows, initial)
    done.run(tell)
    seconds = time.perf_counter() - started
    scores = task.evaluate(done.deployed()["server"], test, generate=True)
    # Those of the last round: what other sites keep belongs to older weights.
    kept = {site: p.tensors for site in done.last_cohort if (p := done.private.get(site)) is not None}
    pairs = {site: tensors for site, tensors in kept.items() if set(tensors) == set(exchange.spec)}
    if pairs:
        scores["aggregation_gap"] = aggregation_gap(list(pairs.values()), [len(rows[site]) for site in pairs])
    if own and (model := done.deployed(own).get("client")):
        scores |= {f"client_{name}": score for name, score in task.evaluate(model, test, generate=True).items()}
    return _Run(scores, done.upload_bytes, done.download_bytes, seconds)


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
