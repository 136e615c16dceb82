"""Accuracy of a ViT by epoch under methods that withhold entries of gradients, pre-trained and from scratch.

A seed cuts the training pictures into a public part, on which the tiny ViT is pre-trained in one place, and a part for
the clients; every method runs the same federation in process from the same weights. Rows of a result:

| row | what |
|---|---|
| <base>, epoch 0 | the weights that every method starts from |
| <base>, <method> | the server's model after the last epoch; `curve` holds every epoch |

| metric | what |
|---|---|
| accuracy | per cent of the test pictures |
| entries moved | mean share of epochs in which an entry of the weights changed |
| expected | the same by Eq. 13, corrected: 1 - R^N |
| count distance | total variation of how often entries moved from Binomial(epochs, 1 - R^N); locked: all or nothing |

Intervals are of 95 %, bootstrapped over test pictures and averaged over seeds, see `resampling`.
"""

from __future__ import annotations

import io
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from fedveil import rng, strategies
from fedveil.benchmarks.common import data, resampling, seeds
from fedveil.benchmarks.common.federations import federation, task_of
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.random_binary.vit import from_scratch
from fedveil.benchmarks.run import Options, Outcome
from fedveil.config import RunConfig, parse
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows, Share
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.rows import partition
from fedveil.tasks.image_classification import ImageClassification

_TEST = 6  # the name of the draws
_BASES = ("pre-trained", "scratch")


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every method from both bases, one run for each seed, and a figure of the curves by epoch."""
    answers: list[dict[str, Any]] = seeds.run(__name__, settings, options)
    rows: list[dict[str, Any]] = []
    last: dict[str, Figure] = {}
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        curve = [
            resampling.over_seeds([resampling.mean(right, _TEST, seed) for seed, right in enumerate(epoch)])
            for epoch in zip(*(each["right"] for each in of_seeds), strict=True)
        ]
        last[name] = curve[-1]
        fixed = {m: resampling.fixed(float(np.mean([e[m] for e in of_seeds]))) for m in of_seeds[0] if m in _MOVED}
        figures = {"accuracy": curve[-1], **fixed}
        row: dict[str, Any] = {"name": name, "metrics": {m: resampling.interval(f) for m, f in figures.items()}}
        row["curve"] = [resampling.interval(f) for f in curve]
        if len(curve) > 1:
            row["upload_bytes"] = round(float(np.mean([e["upload_bytes"] for e in of_seeds])))
            row["seconds"] = round(float(np.mean([e["seconds"] for e in of_seeds])), 1)
        rows.append(row)
    done = f"this run: {settings['clients']} clients, {settings['epochs']} epochs, {len(answers)} seeds"
    return Outcome(rows, _verdicts(last, settings), [done], {"png": _curves(rows)})


_MOVED = ("entries moved", "expected", "count distance")


def _verdicts(last: Mapping[str, Figure], settings: Mapping[str, Any]) -> list[str]:
    said = []
    for claim in settings.get("claims", []):
        for base in claim["bases"]:
            mine, other = (f"{base}, {claim[side]}" for side in ("row", "than"))
            if mine not in last or other not in last:
                continue
            d = resampling.difference(last[mine], last[other])
            held = {"lower": d["high"] < 0, "equal": d["low"] <= 0 <= d["high"]}[claim["is"]]
            said.append(
                f"Accuracy of {mine} less that of {claim['than']}: {resampling.shown(d, '+.1f')} points: "
                f"{resampling.told(d)}; the paper has {claim['is']}: {'holds' if held else 'does not hold'} here."
            )
    return said


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    """What `run` asks of each seed."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        vit = from_scratch(settings["model"], settings["classes"], Path(folder) / "vit")
        bare = _task(settings, vit | {"method.name": "random_binary"}, seed, options)
        public, clients, test = _parts(settings, bare, seed)
        started = time.perf_counter()
        drawn = bare.initial(rng.initial(seed, "weights"))
        bases: dict[str, Weights] = {}
        if "pre-trained" in settings["bases"]:
            first = bare.trainer(public, rng.initial(seed, "pre-training"))
            other = bare.initial(rng.initial(seed, "head"))  # the body was trained to fit the first one
            bases["pre-trained"] = _new_head(first.train(drawn).weights, other)
            options.say(f"seed {seed}: pre-trained in {time.perf_counter() - started:.0f} s")
        if "scratch" in settings["bases"]:
            bases["scratch"] = drawn
        for base, weights in bases.items():
            rows[f"{base}, epoch 0"] = {"right": [_right(bare, weights, test)]}
            for label, chosen in settings["methods"].items():
                rows[f"{base}, {label}"] = row = _method(settings, chosen, vit, weights, clients, test, seed, options)
                options.say(
                    f"seed {seed}: {base}, {label}: accuracy {' '.join(f'{np.mean(r):.1f}' for r in row['right'])} "
                    f"in {row['seconds']:.0f} s"
                )
    return rows


def _new_head(trained: Weights, other: Weights) -> dict[str, torch.Tensor]:
    """The trained body under another head: pre-training leaves what it has seen, not the answer."""
    return {name: other[name] if name.startswith("classifier.") else w for name, w in trained.items()}


def _task(settings: Mapping[str, Any], sections: Mapping[str, Any], seed: int, options: Options) -> ImageClassification:
    """The task under the run config of the settings and of `sections` (task and method)."""
    flat = {
        "task.label-column": "label",
        **settings["config"],
        **sections,
        "run.seed": seed,
        "run.deterministic": True,
        "run.rounds": settings["epochs"] * _exchanges(settings),
    }
    return task_of(ImageClassification, parse(flat), options)


def _exchanges(settings: Mapping[str, Any]) -> int:
    """Batches of a client's rows."""
    members, clients, batch = settings["members"], settings["clients"], settings["config"]["train.batch-size"]
    exchanges: int = -(-members // (clients * batch))
    return exchanges


def _parts(settings: Mapping[str, Any], task: ImageClassification, seed: int) -> tuple[Rows, dict[str, Rows], Rows]:
    """The public part, the clients' rows and the test rows."""
    examples = list(task.examples(data.folder(settings["data"]), "train"))
    random.Random(seed).shuffle(examples)
    members, public = settings["members"], settings["public"]
    if len(examples) < members + public:
        raise ConfigError(
            f"{settings['data']}: expected {members + public} rows, found {len(examples)}; lower members or public"
        )
    trained_on = examples[public : public + members]
    table = Dataset.from_list([dict(example.values) for example in trained_on])
    clients: dict[str, Rows] = {}
    for i in range(settings["clients"]):
        share = Share(i, settings["clients"])
        clients[f"client-{i}"] = task.encode(
            [trained_on[j] for j in partition.indices(table, share, task.config.task, seed)]
        )
    test = task.examples(data.folder(settings["data"]), "test")[: settings["test_rows"]]
    return task.encode(examples[:public]), clients, task.encode(test)


def _right(task: ImageClassification, weights: Weights, rows: Rows) -> list[float]:
    """100 for every row whose class the model names, else 0."""
    found = task.predict(weights, rows)
    return [100.0 * float(int(p.logits["target"].argmax()) == int(p.wanted)) for p in found]


def _method(
    settings: Mapping[str, Any],
    chosen: Mapping[str, Any],
    vit: Mapping[str, Any],
    weights: Weights,
    clients: Mapping[str, Rows],
    test: Rows,
    seed: int,
    options: Options,
) -> dict[str, Any]:
    started, exchanges = time.perf_counter(), _exchanges(settings)
    fields = settings["fields"] + chosen.get("fields", "")
    if chosen["name"] == "random_binary":
        fields += f"\nepoch_batches = {exchanges}" if "never" not in fields else ""
    task = _task(settings, {**vit, "method.name": chosen["name"], "method.fields": fields}, seed, options)
    config: RunConfig = task.config
    method = strategies.create(config.method.name, config.method.fields)
    exchange = Exchange(method, config.method.name, task.spec)

    running = federation(exchange, config, task, clients, weights)
    right, moved = [_right(task, weights, test)], {n: torch.zeros(w.shape) for n, w in weights.items()}
    for epoch in range(settings["epochs"]):
        before = running.deployed()["server"]
        for round_ in range(epoch * exchanges, (epoch + 1) * exchanges):
            running.round(round_)
        after = running.deployed()["server"]
        for name, count in moved.items():
            count += after[name] != before[name]
        right.append(_right(task, after, test))
    rate = chosen.get("rate")
    counted = _counted(moved, settings["epochs"], rate ** len(clients), "never" in fields) if rate is not None else {}
    return {
        "right": right,
        "upload_bytes": running.upload_bytes,
        "seconds": time.perf_counter() - started,
        **counted,
    }


def _counted(moved: Weights, epochs: int, missed: float, locked: bool) -> dict[str, float]:
    """How often entries moved, beside the law of Eq. 13 with `missed` = R^N."""
    counts = torch.cat([count.flatten() for count in moved.values()])
    histogram = torch.bincount(counts.int(), minlength=epochs + 1).double() / counts.numel()
    if locked:
        law = [missed] + [0.0] * (epochs - 1) + [1 - missed]
    else:
        law = [math.comb(epochs, k) * (1 - missed) ** k * missed ** (epochs - k) for k in range(epochs + 1)]
    return {
        "entries moved": float(counts.double().mean()) / epochs,
        "expected": 1 - missed,
        "count distance": float((histogram - torch.tensor(law, dtype=torch.float64)).abs().sum()) / 2,
    }


def _curves(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Accuracy by epoch, a panel a base."""
    from matplotlib.figure import Figure as Canvas

    bases = [base for base in _BASES if any(row["name"].startswith(base + ",") for row in rows)]
    canvas = Canvas(figsize=(5.5 * len(bases), 4), layout="constrained")
    for at, base in enumerate(bases, 1):
        panel = canvas.add_subplot(1, len(bases), at, title=base, xlabel="epoch", ylabel="accuracy, %")
        for row in rows:
            name, _, label = row["name"].partition(", ")
            if name == base and len(row["curve"]) > 1:
                panel.plot([point["mean"] for point in row["curve"]], label=label, marker=".")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    drawn = io.BytesIO()
    canvas.savefig(drawn, format="png", dpi=110)
    return drawn.getvalue()
