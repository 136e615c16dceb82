"""Run one federation for the accuracy table: one base, one method and one seed.

A seed divides the training images into a public part, on which the pretrained base is trained centrally, and a part
for the clients. Every method runs the same in-process federation from the same weights. A base with a "task.model"
starts from the weights in that data folder, with a new random head.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Example, Rows
from fedveil.data import partition
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.image_classification import ImageClassification
from fedveil.testing.training import limit_threads
from fedveil_bench.common import data
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.random_binary.position_task import mark_positions, without_positions
from fedveil_bench.runner import BenchOptions

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class FederationStart:
    """The starting point shared by all methods for a base and a seed.

    Attributes:
        weights: the initial weights.
        clients: each client's examples.
        test: the test examples.
    """

    weights: Weights
    clients: Mapping[str, Rows]
    test: Rows


def prepare_start(settings: Settings, vit: Settings, base: str, seed: int, options: BenchOptions) -> FederationStart:
    """Return a base's initial weights, and the examples.

    Args:
        settings: the preset's settings.
        vit: the model's task section.
        base: a name in settings["bases"].
        seed: the seed for all random draws.
        options: only the device is used.

    Raises:
        ConfigError: there are fewer images than the base needs, or a folder has a different model than the preset's.
        TaskError: the model in a folder cannot be loaded.
    """
    task, asked = _task(settings, {**vit, "method.name": "random_binary"}, seed, options), settings["bases"][base]
    public, members, test = _parts(settings, asked, task, seed)
    weights: Weights = task.initial(rng.initial_stream(seed, "weights"))
    if public:
        first = task.trainer(task.encode(public), rng.initial_stream(seed, "pre-training"))
        other = task.initial(rng.initial_stream(seed, "head"))  # new, because the body was trained with the first head
        weights = _new_head(first.train(weights).weights, other)
    if "task.model" in asked:
        found = data.with_model({"task.model": asked["task.model"]})
        kept = {k: v for k, v in vit.items() if k not in ("task.from-scratch", "task.num-classes")}
        named = _task(settings, {**kept, **found, "method.name": "random_binary"}, seed, options)
        weights = _of_folder(asked["task.model"], named.initial(rng.initial_stream(seed, "weights")), weights)
    if asked.get("marked"):
        weights = without_positions(weights)
    table = Dataset.from_list([dict(example.values) for example in members])
    clients: dict[str, Rows] = {}
    for i in range(settings["clients"]):
        of_one = partition.partition_indices(table, DatasetShard(i, settings["clients"]), task.config.task, seed)
        clients[f"client-{i}"] = task.encode([members[j] for j in of_one])
    return FederationStart(weights, clients, task.encode(test))


def run_row(
    settings: Settings, vit: Settings, chosen: Settings, begun: FederationStart, seed: int, options: BenchOptions
) -> dict[str, Any]:
    """Run a federation under the method `chosen`; return its figures.

    | key | meaning |
    |---|---|
    | curve | percent of the test images that the server's model classifies correctly, at the start and by epoch |
    | right | one bit for each test image, after the last epoch: correct or not, packed (base64) |
    | counts | share of the weight entries that moved in 0, 1, ... of the epochs |
    | upload_bytes | total over all clients |
    | seconds | total time |
    """
    started, exchanges = time.perf_counter(), settings["exchanges"]
    fields = settings["fields"] + chosen.get("fields", "")
    if chosen["name"] == "random_binary" and "never" not in fields:
        fields += f"\nepoch_batches = {exchanges}"
    task = _task(settings, {**vit, "method.name": chosen["name"], "method.params": fields}, seed, options)
    config = task.config
    exchange = MessageExchange(
        strategies.create_method(config.method.name, config.method.params), config.method.name, task.spec
    )
    with limit_threads(config):
        running = create_federation(exchange, config, task, begun.clients, begun.weights)
        right = [_right(task, begun.weights, begun.test)]
        moved = {name: torch.zeros(w.shape) for name, w in begun.weights.items()}
        for epoch in range(settings["epochs"]):
            before = running.models()["server"]
            for round_ in range(epoch * exchanges, (epoch + 1) * exchanges):
                running.round(round_)
            after = running.models()["server"]
            for name, count in moved.items():
                count += after[name] != before[name]
            right.append(_right(task, after, begun.test))
    counts = torch.cat([count.flatten() for count in moved.values()])
    histogram = torch.bincount(counts.int(), minlength=settings["epochs"] + 1).double() / counts.numel()
    return {
        "curve": [round(100 * float(np.mean(r)), 3) for r in right],
        "right": base64.b64encode(np.packbits(right[-1]).tobytes()).decode(),
        "counts": [round(share, 7) for share in histogram.tolist()],
        "upload_bytes": running.upload_bytes,
        "seconds": round(time.perf_counter() - started, 1),
    }


def unpack_correct(right: str, rows: int) -> list[float]:
    """Return 100 for each test example that was classified correctly, and 0 for the others."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(right), np.uint8), count=rows)
    return [100.0 * float(bit) for bit in bits]


def _new_head(trained: Weights, other: Weights) -> dict[str, torch.Tensor]:
    """Return the trained body with a new head, because pretraining teaches features, not these classes."""
    return {name: other[name] if name.startswith("classifier.") else w for name, w in trained.items()}


def _of_folder(name: str, trained: Weights, other: Weights) -> dict[str, torch.Tensor]:
    """Return `_new_head`'s result. Raises ConfigError unless the model, except for its classes, is the preset's."""
    shapes = ({n: tuple(w.shape) for n, w in of.items() if not n.startswith("classifier.")} for of in (trained, other))
    mine, wanted = shapes
    if apart := sorted(n for n in mine.keys() | wanted.keys() if mine.get(n) != wanted.get(n)):
        at = apart[0]
        raise ConfigError(
            f"task.model {name}: expected the model of the preset, {at} of {wanted.get(at, 'no shape')}, found "
            f"{mine.get(at, 'none')}; name a folder with that model, or correct settings.model"
        )
    return _new_head(trained, other)


def _task(settings: Settings, sections: Settings, seed: int, options: BenchOptions) -> ImageClassification:
    """Return the task for a run config with the preset's settings and `sections` (task and method)."""
    flat = {
        "task.label-column": "label",
        **settings["config"],
        **sections,
        "run.seed": seed,
        "run.deterministic": True,
        "run.rounds": settings["epochs"] * settings["exchanges"],
    }
    return task_of(ImageClassification, parse(flat), options)


def _parts(
    settings: Settings, asked: Settings, task: ImageClassification, seed: int
) -> tuple[list[Example], list[Example], list[Example]]:
    """Return the public part, the clients' images and the test images."""
    folder, members, public = data.find_data_folder(settings["data"]), asked["members"], asked.get("public", 0)
    examples, test = list(task.examples(folder, "train")), list(task.examples(folder, "test")[: settings["test_rows"]])
    if len(examples) < members + public:
        raise ConfigError(
            f"{settings['data']}: expected {members + public} rows, found {len(examples)}; lower members or public"
        )
    random.Random(seed).shuffle(examples)
    examples = examples[: public + members]
    if asked.get("marked"):
        grid = settings["model"]["image_size"] // settings["model"]["patch_size"]
        classes = settings["classes"]
        examples, test = (
            mark_positions(examples, classes, grid, 2 * seed),
            mark_positions(test, classes, grid, 2 * seed + 1),
        )
    return examples[:public], examples[public:], test


def _right(task: ImageClassification, weights: Weights, rows: Rows) -> list[bool]:
    """Return, for each example, whether the model classifies it correctly."""
    found = task.predict(weights, rows)
    return [int(p.logits["target"].argmax()) == int(p.wanted) for p in found]
