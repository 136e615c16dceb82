"""The tables of FedRand on pictures: quality of server and clients, ablations, and what membership attacks see.

A seed draws members (cut over the clients), held-out rows of the same distribution, and test rows; every method runs the
same federation in process, with a tap. Rows of a result:

| row | which model |
|---|---|
| round 0 | the model before any round: the control that an attack must lose |
| overfitted FedAvg | a few members, many epochs, no defence: the control that an attack must win |
| <method> server | the model that the server holds at the end |
| <method> client | in quality: what clients hold, the mean of some; under attack: what the server rebuilds of them |
| <method> client, merged | the client's last upload, the rest from the broadcast it answered |

The shifted non-members come from another data set, as NoCaps beside COCO in the paper: an attack wins there without any
membership. All intervals are of 95 %, see `resampling`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng, strategies, tasks
from fedveil.attacks import controls
from fedveil.attacks.base import View
from fedveil.attacks.hidden_model import factor_pairing
from fedveil.attacks.membership import scores as membership
from fedveil.benchmarks.common import data, pictures, quality, resampling, seeds
from fedveil.benchmarks.common.forwarding import Forwarding
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand.adversary import Adversary, Figures, NonMembers, Target, Yardstick
from fedveil.benchmarks.run import Options, Outcome
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Weights
from fedveil.contract.task import Example, Rows, Share, Task
from fedveil.contract.trainer import Local, Trained
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.rows import partition
from fedveil.tasks.vision_language import VisionLanguage
from fedveil.wire.tap import Tap

_SITES = 4  # the name of the draws over sites


@dataclass
class _Row:
    """One row of one seed."""

    figures: Figures = field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    seconds: float = 0.0


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every part of `settings["parts"]` under every method of `settings["methods"]`, a run a seed."""
    answers = [_from_json(answer) for answer in seeds.run("fedveil.benchmarks.fedrand.tables", settings, options)]
    rows: dict[str, Figures] = {}
    listed = []
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        figures = {m: resampling.over_seeds([row.figures[m] for row in of_seeds]) for m in of_seeds[0].figures}
        rows[name] = figures
        shown: dict[str, Any] = {"name": name, "metrics": {m: resampling.interval(f) for m, f in figures.items()}}
        if of_seeds[0].upload_bytes:
            shown |= {
                "upload_bytes": round(statistics.fmean(r.upload_bytes for r in of_seeds)),
                "download_bytes": round(statistics.fmean(r.download_bytes for r in of_seeds)),
                "rounds": settings["config"]["run.rounds"],
                "seconds": round(statistics.fmean(r.seconds for r in of_seeds), 1),
            }
        listed.append(shown)
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} clients, {config['run.rounds']} rounds of {config['train.epochs']} epochs, at most "
        f"{config.get('train.max-steps') or 'all'} steps of {config['train.batch-size']} rows, at {config['train.learning-rate']:g}; "
        f"{len(answers)} seeds"
    )
    return Outcome(listed, _verdicts(rows, settings), [done])


def _verdicts(rows: Mapping[str, Figures], settings: Mapping[str, Any]) -> list[str]:
    said = []
    for order in settings.get("orders", []):
        sign = 1.0 if order["better"] == "higher" else -1.0
        metric, view = order["metric"], order["view"]
        figures = {
            name: Figure(sign * f.value, sign * f.replicates, f.count)
            for name in settings["methods"]
            if (f := rows[f"{name} {view}".strip()].get(metric)) is not None
        }
        what = f"{metric} of {view or 'the method'} ({order['better']} first)"
        if len(figures) > 1:
            said.append(resampling.ordering(figures, order["rows"], what))
    for control, side in (("overfitted FedAvg", "above"), ("round 0", "contains")):
        for metric, figure in rows.get(control, {}).items():
            if metric in settings.get("controls", []):
                said.append(_control(control, side, metric, figure))
    for name, figures in rows.items():
        if wrong := figures.get("alignment, wrong site"):
            said.append(_control(name, "not above", "alignment, wrong site", wrong))
    for smaller, larger in settings.get("errors", []):
        d = resampling.difference(
            rows[f"{larger} client"]["reconstruction error"], rows[f"{smaller} client"]["reconstruction error"]
        )
        verdict = "is smaller than" if d["low"] > 0 else "is not smaller than"
        said.append(f"Reconstruction error: {smaller} {verdict} {larger} (difference {d['mean']:.3g}).")
    return said


def _control(name: str, side: str, metric: str, figure: Figure) -> str:
    i = resampling.interval(figure)
    inside = i["low"] <= 0.5 <= i["high"]
    held = {"above": i["low"] > 0.5, "contains": inside, "not above": i["low"] <= 0.5}[side]
    asked = {"above": "wholly above 0.5", "contains": "0.5 inside", "not above": "not wholly above 0.5"}[side]
    return (
        f"Control {name}, {metric}: {i['mean']:.3f} [{i['low']:.3f}, {i['high']:.3f}], expected {asked}: "
        f"{'held' if held else 'NOT HELD'}."
    )


@dataclass(frozen=True)
class _Data:
    """What one seed of one part works on."""

    clients: Mapping[str, Rows]
    held_out: Rows
    shifted: Rows
    test: Sequence[pictures.Example]
    labels: Mapping[str, Sequence[str]]  # of each client's rows; of the held-out ones under ""


class _Remembering(Forwarding):
    """Leaves what it trained last where the benchmark finds it: the truth that a rebuilt client is held to."""

    def __init__(self, local: Local, site: str, truth: dict[str, Weights]) -> None:
        super().__init__(local)
        self._site, self._truth = site, truth

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        trained = super().train(weights, frozen)
        self._truth[self._site] = trained.weights
        return trained


def _of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    rows: dict[str, _Row] = {}
    for part in settings["parts"]:
        for name, row in _part(settings, part, seed, options).items():
            kept = rows.setdefault(name, _Row())
            prefix = f"{part['name']} " if part["name"] else ""
            kept.figures |= {prefix + metric: figure for metric, figure in row.figures.items()}
            kept.upload_bytes += row.upload_bytes
            kept.download_bytes += row.download_bytes
            kept.seconds += row.seconds
    return _to_json(rows)


def _part(settings: dict[str, Any], part: dict[str, Any], seed: int, options: Options) -> dict[str, _Row]:
    flat = {"task.name": "vision-language", **settings["config"], **part.get("config", {})}
    flat |= pictures.columns(part["data"]) | {"run.seed": seed, "run.deterministic": True}
    if flat["task.model"] != "tiny":
        flat["task.model"] = str(data.folder(flat["task.model"]))
    config = parse(flat)
    task = _task(parse(flat | {"method.name": "fedavg"}), options)
    found = _data(settings, part, task, seed)
    rows: dict[str, _Row] = {"round 0": _Row()}
    initial = task.initial(rng.initial(seed, "weights"))
    rows["round 0"].figures |= _quality(task, [initial], found, part, seed)
    adversary = None
    if settings["attack"]:
        adversary = _adversary(settings["attack"], flat, task, initial, found, options)
        of_all = [row for of_client in found.clients.values() for row in of_client]
        rows["round 0"].figures |= adversary.attacked(task, [Target((), initial, of_all)])
        own, started = controls.settings(config), time.perf_counter()
        figures, done = adversary.overfitted(_task(own, options), of_all[: settings["overfitted_members"]], own)
        rows["overfitted FedAvg"] = _Row(figures, seconds=time.perf_counter() - started)
        options.say(f"seed {seed}: overfitted FedAvg: {done.loss_share:.3f} of the loss is left")
    for label, chosen in settings["methods"].items():
        fields = {"method.name": chosen["name"], "method.fields": chosen.get("fields", "")}
        rows |= _method(label, parse(flat | fields), settings, part, found, adversary, seed, options)
    return rows


def _adversary(
    settings: Mapping[str, Any], flat: Mapping[str, Any], task: Task, initial: Weights, found: _Data, options: Options
) -> Adversary:
    seed, yardstick = flat["run.seed"], None
    if settings["shadows"]:
        members = [row for of_client in found.clients.values() for row in of_client]
        config = parse({**flat, "method.name": "fedavg", "train.max-steps": settings["shadow_steps"]})
        pool = [*members, *found.held_out[: len(members)]]
        yardstick = Yardstick(_task(config, options), initial, pool, settings["shadows"], seed)
    others = NonMembers(found.held_out, found.labels[""], found.shifted)
    return Adversary(membership.Base(task, initial), yardstick, others, settings, seed)


def _task(config: RunConfig, options: Options) -> VisionLanguage:
    adapter = strategies.create(config.method.name, config.method.fields).adapter
    task = tasks.load(config, adapter, options.device)
    assert isinstance(task, VisionLanguage)
    return task


def _data(settings: Mapping[str, Any], part: Mapping[str, Any], task: VisionLanguage, seed: int) -> _Data:
    from datasets import Dataset

    pool = _shuffled(pictures.examples(part["data"], "train"), seed)
    members, held_out = part["members"], part["held_out"]
    test = _shuffled(pictures.examples(part["test"], "test"), 0) if part.get("test") else pool[members:]
    shifted = pictures.examples(part["shifted"], "test") if part.get("shifted") else []
    shifted = _shuffled(shifted, 0)[: part.get("shifted_rows", held_out)]
    table = Dataset.from_list([dict(row) for row in pool[:members]])
    parts = [
        partition.cut(table, Share(i, settings["clients"]), task.config.task, seed) for i in range(settings["clients"])
    ]
    of_clients = {f"client-{i:02d}": of_site.to_list() for i, of_site in enumerate(parts)}
    others = pool[members : members + held_out]
    return _Data(
        {client: task.encode(Example.of(rows)) for client, rows in of_clients.items()},
        task.encode(Example.of(others)),
        task.encode(Example.of(shifted)),
        test[: part["test_rows"]],
        {client: [row["label"] for row in rows] for client, rows in {**of_clients, "": others}.items()},
    )


def _shuffled(found: Sequence[pictures.Example], seed: int) -> list[pictures.Example]:
    return random.Random(seed).sample(list(found), len(found))


def _method(
    label: str,
    config: RunConfig,
    settings: Mapping[str, Any],
    part: Mapping[str, Any],
    found: _Data,
    adversary: Adversary | None,
    seed: int,
    options: Options,
) -> dict[str, _Row]:
    task = _task(config, options)
    method = strategies.create(config.method.name, config.method.fields)
    exchange = Exchange(method, config.method.name, task.spec)
    rows = {f"{label} server": _Row(), f"{label} client": _Row()}
    with tempfile.TemporaryDirectory() as folder:
        tap = Tap(Path(folder))
        federation, truth, seconds = _federate(exchange, config, task, found.clients, seed, tap)
        server = federation.deployed()["server"]
        view = View.server(tap, exchange)
        last_first = list(dict.fromkeys(s.site for s in reversed(list(view.uploads()))))
        latest = {site: factor_pairing.latest(view, site, server) for site in last_first}
        merged = {site: factor_pairing.merged(view, site, server) for site in last_first}
        scored = last_first[: settings["clients_scored"]]
        if adversary:
            initial = task.initial(rng.initial(seed, "weights"))
            clients = {site: (found.clients[site], found.labels[site]) for site in scored}
            rows[f"{label} client"].figures |= adversary.aligned(view, task, initial, clients)
    rows[f"{label} server"] = _Row({}, federation.upload_bytes, federation.download_bytes, seconds)
    rows[f"{label} server"].figures |= _quality(task, [server], found, part, seed)
    rows[f"{label} client"].figures |= _quality(task, [truth[site] for site in scored], found, part, seed)
    if adversary:
        errors = [factor_pairing.reconstruction_error(latest[s].weights, truth[s]) for s in last_first]
        others = [factor_pairing.reconstruction_error(merged[s].weights, truth[s]) for s in last_first]
        rows[f"{label} client"].figures |= {
            # The better of the two pairings: which one it is depends on how far clients drift.
            "reconstruction error": resampling.mean(
                [min(e.products, o.products) for e, o in zip(errors, others, strict=True)], _SITES, seed
            ),
            "latest error": resampling.mean([e.products for e in errors], _SITES, seed),
            "merged error": resampling.mean([e.products for e in others], _SITES, seed),
            "tensor error": resampling.mean([e.tensors for e in errors], _SITES, seed),
            "coverage": resampling.mean([latest[s].coverage for s in last_first], _SITES, seed),
        }
        of_all = [row for site in last_first for row in found.clients[site]]
        rows[f"{label} server"].figures |= adversary.attacked(task, [Target((), server, of_all)])
        for name, rebuilt in (("client", latest), ("client, merged", merged)):
            targets = [
                Target((i,), rebuilt[site].weights, found.clients[site], found.labels[site])
                for i, site in enumerate(sorted(scored), 10)
            ]
            if name == "client" or config.method.name == "fedrand":
                rows.setdefault(f"{label} {name}", _Row()).figures |= adversary.attacked(task, targets)
    options.say(f"seed {seed}: {part['name']} {label}: {_brief(rows)} in {seconds:.0f} s")
    return rows


def _federate(
    exchange: Exchange, config: RunConfig, task: Task, clients: Mapping[str, Rows], seed: int, tap: Tap
) -> tuple[Federation, dict[str, Weights], float]:
    started = time.perf_counter()
    initial = task.initial(rng.initial(seed, "weights"))
    truth: dict[str, Weights] = {}

    def local_for(site: str, ctx: RoundContext) -> Local:
        return _Remembering(task.local(clients[site], ctx.rng("batches")), site, truth)

    state = exchange.method.init(exchange.spec, initial, rng.initial(seed, "method init"))
    federation = Federation(exchange, config, local_for, list(clients), state, tap=tap)
    federation.run()
    return federation, truth, time.perf_counter() - started


def _quality(
    task: VisionLanguage, models: Sequence[Weights], found: _Data, part: Mapping[str, Any], seed: int
) -> Figures:
    """Scores of the mean model, each on the same test rows."""
    if not found.test or not models:
        return {}
    each = [quality.scores(task, weights, found.test, part["metrics"], seed) for weights in models]
    return {name: resampling.average([scores[name] for scores in each]) for name in each[0]}


def _brief(rows: Mapping[str, _Row]) -> str:
    return "; ".join(
        f"{name.rpartition(' ')[2]} {', '.join(f'{m} {f.value:.3f}' for m, f in list(row.figures.items())[:3])}"
        for name, row in rows.items()
    )


def _to_json(rows: Mapping[str, _Row]) -> dict[str, Any]:
    return {
        name: {
            "figures": {m: [f.value, f.replicates.tolist(), f.count] for m, f in row.figures.items()},
            "rest": [row.upload_bytes, row.download_bytes, row.seconds],
        }
        for name, row in rows.items()
    }


def _from_json(rows: Mapping[str, Any]) -> dict[str, _Row]:
    return {
        name: _Row({m: Figure(v, np.array(r), n) for m, (v, r, n) in row["figures"].items()}, *row["rest"])
        for name, row in rows.items()
    }


if __name__ == "__main__":
    seeds.serve(_of_seed)
