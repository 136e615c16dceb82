"""The same run without Flower, for the tests of real federations on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.console.flower.local_deployment import LocalDeployment, RunOutcome
from fedveil.contract.task import DatasetShard
from fedveil.federation import in_process as inprocess
from fedveil.federation.exchange import MessageExchange
from fedveil.records import disclosure_ledger
from fedveil.records.tensor_state import state_digest
from fedveil.server_app.run_plan import RunPlan
from tests.conftest import ROOT

CLASSES = ("cat", "sea horse", "dog", "ox")


def lines(path: Path) -> list[dict]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def over_grpc(federation: LocalDeployment, at: Path, overrides: Mapping[str, Any], timeout: float = 240) -> RunOutcome:
    """The run in the folder `at`/<method>."""
    here = {"run.dir": str(at), "run.name": overrides["method.name"]}
    return federation.wait(federation.run(ROOT, {**overrides, **here}), timeout=timeout)


def in_process(flat: Mapping[str, Any], data: Path, sites: int) -> inprocess.InProcessFederation:
    """The same run in this process, ended."""
    run = build_in_process(flat, data, sites)
    run.run()
    return run


def build_in_process(flat: Mapping[str, Any], data: Path, sites: int) -> inprocess.InProcessFederation:
    """The same run in this process, before its first round."""
    config = parse(dict(flat))
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    rows = {f"site-{i}": task.encode(task.examples(data, "train", DatasetShard(i, sites))) for i in range(sites)}
    weights = RunPlan.from_config(config, "in process").initial_weights()
    return inprocess.InProcessFederation(
        MessageExchange(method, config.method.name, task.spec),
        config,
        lambda site, ctx: task.trainer(rows[site], ctx.rng("batches")),
        sorted(rows),
        method.init(task.spec, weights, rng.initial_stream(config.run.seed, "method init")),
        max_share=config.cohort.max_weight_fraction,
    )


def check_same(at: Path, reference: inprocess.InProcessFederation, rounds: int) -> None:
    """Weights bit for bit, no site failed, bytes of either direction."""
    metrics, ledger = lines(at / "metrics.jsonl"), disclosure_ledger.read_messages(at / "disclosure.jsonl")
    assert metrics[-1]["weights"] == state_digest(reference.models()["server"])
    assert [m["failed"] for m in metrics[1:]] == [{}] * rounds
    uploads = sum(m.get("upload_bytes", 0) for m in metrics)
    assert abs(uploads - reference.upload_bytes) <= 32 * len(ledger)  # the seconds that a site reports vary in length
    assert sum(m.get("download_bytes", 0) for m in metrics) == reference.download_bytes
    for line in ledger:
        assert line["bytes"] - line["payload_bytes"] < 500 + 30 * len(line["fields"])


def write_pictures(at: Path) -> None:
    """Write twelve pictures of every class for either split, whose colour says the class."""
    from PIL import Image

    generator = torch.Generator().manual_seed(3)
    for split in ("train", "test"):
        for number, name in enumerate(CLASSES):
            (at / split / name).mkdir(parents=True)
            for i in range(12):
                pixels = torch.randint(0, 90, (40, 40, 3), generator=generator)
                pixels[..., number % 3] += 40 * number
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(at / split / name / f"{i}.png")
