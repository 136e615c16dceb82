"""FedRand and its baselines on images: server and client quality, ablations, and membership attacks.

A seed draws members (split over the clients), held-out rows from the same distribution, and test rows. Every method
runs the same in-process federation and records its messages. Rows in a result:

| row | model |
|---|---|
| round 0 | the model before any round: a control in which attacks must fail |
| other rows | trained on half of the members, attacked on the other half: a control in which attacks must fail |
| overfitted FedAvg | few members, many epochs, no defense: the control in which attacks must succeed |
| <method> server | the server's final model |
| <method> client | quality: the mean over some clients' models; under attack: the server's reconstruction |
| <method> client, merged | the client's last upload, completed from the broadcast it answered |

With `curve_every`, the server rows have a curve of the loss on the test rows, if the part has any (see `curves`).

The shifted non-members come from a different data set, like NoCaps for COCO in the paper: there an attack can succeed
without learning anything about membership. All intervals are 95% (see `resampling`).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil import rng, strategies
from fedveil.attacks.audit import controls
from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, AdversaryView
from fedveil.attacks.membership import model_scores as membership
from fedveil.attacks.model_extraction import factor_pairing
from fedveil.attacks.model_extraction.factor_pairing import RebuiltClient
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Task
from fedveil.contract.trainer import Frozen, Penalty, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.vision_language import VisionLanguage
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import data, pictures, quality, resampling, seeds
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedrand import curves
from fedveil_bench.fedrand.adversary import AttackTarget, ControlYardstick, FedRandAdversary, Figures, NonMembers
from fedveil_bench.fedrand.picture_partition import PicturePartition, draw_partition
from fedveil_bench.fedrand.verdicts import list_verdicts
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SITES = 4  # names the random draws over sites
_CURVE = ("test loss",)  # metrics scored by round; they need no generated text


@dataclass
class _Row:
    """One row of the table, for one seed."""

    figures: Figures = field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    seconds: float = 0.0
    curve: list[curves.CurvePoint] = field(default_factory=list)


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: the folders with the images for every part, and the base."""
    asked = [(part["data"], "train") for part in settings["parts"]]
    asked += [(part[key], "test") for part in settings["parts"] for key in ("test", "shifted") if part.get(key)]
    splits: dict[str, dict[str, None]] = {}
    for folder, split in itertools.starmap(pictures.find_source, asked):
        splits.setdefault(folder, {})[split] = None
    return [
        *(data.DataRequirement(folder, tuple(found)) for folder, found in splits.items()),
        *data.list_base_requirements(settings),
    ]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return each of `settings["parts"]` with each of `settings["methods"]`, with one run per seed."""
    answers = [_from_json(answer) for answer in seeds.run_seeds(__name__, settings, options)]
    rows: dict[str, Figures] = {}
    listed = []
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        shared = [m for m in of_seeds[0].figures if all(m in row.figures for row in of_seeds)]
        figures = {m: resampling.over_seeds([row.figures[m] for row in of_seeds]) for m in shared}
        rows[name] = figures
        shown: dict[str, Any] = {
            "name": name,
            "metrics": {m: resampling.compute_interval(f) for m, f in figures.items()},
        }
        if of_seeds[0].upload_bytes:
            shown |= {
                "upload_bytes": round(statistics.fmean(r.upload_bytes for r in of_seeds)),
                "download_bytes": round(statistics.fmean(r.download_bytes for r in of_seeds)),
                "rounds": settings["config"]["run.rounds"],
                "seconds": round(statistics.fmean(r.seconds for r in of_seeds), 1),
            }
        if of_seeds[0].curve:
            shown["curve"] = curves.in_result([row.curve for row in of_seeds])
        listed.append(shown)
    followed = {name: [answer[name].curve for answer in answers] for name in answers[0]}
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} clients, {config['run.rounds']} rounds of {config['train.epochs']} epochs, "
        f"at most {config.get('train.max-steps') or 'all'} steps of {config['train.batch-size']} rows, at "
        f"{config['train.learning-rate']:g}; {len(answers)} seeds"
    )
    said = [*list_verdicts(rows, settings), *curves.compare_costs(followed, settings.get("curve_targets", []))]
    return BenchOutcome(listed, said, [done])


class _Remembering(TrainerWrapper):
    """Stores its last training result for the benchmark, as the ground truth for a reconstructed client."""

    def __init__(self, truth: dict[str, Weights], site: str, ctx: RoundContext, local: Trainer) -> None:
        super().__init__(local)
        self._site, self._truth = site, truth

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        trained = super().train(weights, frozen, penalty)
        self._truth[self._site] = trained.weights
        return trained


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    rows: dict[str, _Row] = {}
    for part in settings["parts"]:
        for name, row in _part(settings, part, seed, options).items():
            kept = rows.setdefault(name, _Row())
            prefix = f"{part['name']} " if part["name"] else ""
            kept.figures |= {prefix + metric: figure for metric, figure in row.figures.items()}
            kept.upload_bytes += row.upload_bytes
            kept.download_bytes += row.download_bytes
            kept.seconds += row.seconds
            for point in row.curve:
                kept.curve.append(replace(point, figures={prefix + m: f for m, f in point.figures.items()}))
    return _to_json(rows)


def _part(settings: dict[str, Any], part: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, _Row]:
    flat = {"task.name": "vision-language", **settings["config"], **part.get("config", {})}
    flat |= pictures.build_column_keys(part["data"]) | {"run.seed": seed, "run.deterministic": True}
    flat = data.with_model(flat)
    config = parse(flat)
    task = task_of(VisionLanguage, parse(flat | {"method.name": "fedavg"}), options)
    found = draw_partition(settings, part, task, seed)
    rows: dict[str, _Row] = {"round 0": _Row()}
    initial = task.initial(rng.initial_stream(seed, "weights"))
    rows["round 0"].figures |= _quality(task, [initial], found, part)
    adversary = None
    if settings["attack"]:
        adversary = _adversary(settings["attack"], flat, task, initial, found, options)
        rows["round 0"].figures |= adversary.attacked(task, [AttackTarget((), initial, found.members)])
        rows |= _trained_controls(adversary, config, found, settings["overfitted_members"], options)
    for label in part.get("methods", settings["methods"]):
        chosen = settings["methods"][label]
        fields = {"method.name": chosen["name"], "method.params": chosen.get("fields", "")}
        rows |= _method(label, parse(flat | fields), settings, part, found, adversary, seed, options)
    return rows


def _trained_controls(
    adversary: FedRandAdversary, config: RunConfig, found: PicturePartition, members: int, options: BenchOptions
) -> dict[str, _Row]:
    """Return a model overfitted on `members` rows and a model trained on other rows; neither if `members` is 0."""
    if not members:
        return {}
    rows = {}
    own, started = controls.control_config(config), time.perf_counter()
    figures, done = adversary.overfitted(task_of(VisionLanguage, own, options), found.members[:members], own)
    rows[OVERFITTED] = _Row(figures, seconds=time.perf_counter() - started)
    options.say(f"seed {config.run.seed}: {OVERFITTED}: {done.loss_share:.3f} of the loss is left")
    gentle, started = controls.gentle_config(own), time.perf_counter()
    figures, done = adversary.other_rows(task_of(VisionLanguage, gentle, options), found.members, gentle)
    rows[OTHER_ROWS] = _Row(figures, seconds=time.perf_counter() - started)
    options.say(f"seed {config.run.seed}: {OTHER_ROWS}: {done.loss_share:.3f} of the loss is left")
    return rows


def _adversary(
    settings: Mapping[str, Any],
    flat: Mapping[str, Any],
    task: Task,
    initial: Weights,
    found: PicturePartition,
    options: BenchOptions,
) -> FedRandAdversary:
    seed, yardstick = flat["run.seed"], None
    if settings["shadows"]:
        members = found.members
        config = parse({**flat, "method.name": "fedavg", "train.max-steps": settings["shadow_steps"]})
        pool = [*members, *found.held_out[: len(members)]]
        yardstick = ControlYardstick(task_of(VisionLanguage, config, options), initial, pool, settings["shadows"], seed)
    others = NonMembers(found.held_out, found.labels[""], found.shifted)
    return FedRandAdversary(membership.PublicBaseScores(task, initial), yardstick, others, settings, seed)


def _method(
    label: str,
    config: RunConfig,
    settings: Mapping[str, Any],
    part: Mapping[str, Any],
    found: PicturePartition,
    adversary: FedRandAdversary | None,
    seed: int,
    options: BenchOptions,
) -> dict[str, _Row]:
    task = task_of(VisionLanguage, config, options)
    method = strategies.create_method(config.method.name, config.method.params)
    exchange = MessageExchange(method, config.method.name, task.spec)
    rows = {f"{label} server": _Row(), f"{label} client": _Row()}
    with tempfile.TemporaryDirectory() as folder:
        tap = MessageCapture(Path(folder))
        truth: dict[str, Weights] = {}
        started, initial = time.perf_counter(), task.initial(rng.initial_stream(seed, "weights"))
        remembering = partial(_Remembering, truth)
        running = create_federation(exchange, config, task, found.clients, initial, tap, remembering)
        every = settings.get("curve_every", 0) if found.test else 0
        followed = curves.run_and_score(
            running, every, lambda weights: quality.compute_scores(task, weights, found.test, _CURVE)
        )
        seconds = time.perf_counter() - started - followed.seconds
        server = running.models()["server"]
        view = AdversaryView.server(tap, exchange)
        last_first = list(dict.fromkeys(s.site for s in reversed(list(view.uploads()))))
        latest = {site: factor_pairing.latest_factors(view, site, server) for site in last_first}
        merged = {site: factor_pairing.merge_with_broadcast(view, site, server) for site in last_first}
        scored = last_first[: settings["clients_scored"]]
        if adversary:
            clients = {site: (found.clients[site], found.labels[site]) for site in scored}
            rows[f"{label} client"].figures |= adversary.aligned(view, task, initial, clients)
    rows[f"{label} server"] = _Row({}, running.upload_bytes, running.download_bytes, seconds, followed.points)
    rows[f"{label} server"].figures |= _quality(task, [server], found, part)
    rows[f"{label} client"].figures |= _quality(task, [truth[site] for site in scored], found, part)
    if adversary:
        rows[f"{label} client"].figures |= _rebuilt(latest, merged, truth)
        of_all = [row for site in last_first for row in found.clients[site]]
        rows[f"{label} server"].figures |= adversary.attacked(task, [AttackTarget((), server, of_all)])
        for name, rebuilt in (("client", latest), ("client, merged", merged)):
            targets = [
                AttackTarget((i,), rebuilt[site].weights, found.clients[site], found.labels[site])
                for i, site in enumerate(sorted(scored), 10)
            ]
            if name == "client" or config.method.name == "fedrand":
                rows.setdefault(f"{label} {name}", _Row()).figures |= adversary.attacked(task, targets)
    options.say(f"seed {seed}: {part['name']} {label}: {_brief(rows)} in {seconds:.0f} s")
    return rows


def _rebuilt(
    latest: Mapping[str, RebuiltClient], merged: Mapping[str, RebuiltClient], truth: Mapping[str, Weights]
) -> Figures:
    """Return the distance between true and reconstructed clients for each pairing, averaged over the sites."""
    errors = [factor_pairing.reconstruction_error(latest[site].weights, truth[site]) for site in latest]
    others = [factor_pairing.reconstruction_error(merged[site].weights, truth[site]) for site in latest]
    values = {
        # Which of the two pairings is better depends on the clients' drift.
        "reconstruction error": [min(e.products, o.products) for e, o in zip(errors, others, strict=True)],
        "latest error": [e.products for e in errors],
        "merged error": [o.products for o in others],
        "tensor error": [e.tensors for e in errors],
        "coverage": [rebuilt.coverage for rebuilt in latest.values()],
    }
    return {name: resampling.resample_mean(each, _SITES) for name, each in values.items()}


def _quality(
    task: VisionLanguage, models: Sequence[Weights], found: PicturePartition, part: Mapping[str, Any]
) -> Figures:
    """Return the scores, averaged over the models, on the same test rows for each."""
    if not found.test or not models:
        return {}
    each = [quality.compute_scores(task, weights, found.test, part["metrics"]) for weights in models]
    return {name: resampling.average_metrics([scores[name] for scores in each]) for name in each[0]}


def _brief(rows: Mapping[str, _Row]) -> str:
    return "; ".join(
        f"{name.rpartition(' ')[2]} {', '.join(f'{m} {f.value:.3f}' for m, f in list(row.figures.items())[:3])}"
        for name, row in rows.items()
    )


def _to_json(rows: Mapping[str, _Row]) -> dict[str, Any]:
    return {
        name: {
            "figures": {m: f.to_json() for m, f in row.figures.items()},
            "rest": [row.upload_bytes, row.download_bytes, row.seconds],
            "curve": [point.to_json() for point in row.curve],
        }
        for name, row in rows.items()
    }


def _from_json(rows: Mapping[str, Any]) -> dict[str, _Row]:
    found = {}
    for name, row in rows.items():
        figures = {m: ResampledMetric.from_json(f) for m, f in row["figures"].items()}
        found[name] = _Row(figures, *row["rest"])
        found[name].curve = [curves.CurvePoint.from_json(point) for point in row["curve"]]
    return found
