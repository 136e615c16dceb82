"""The same run without Flower, for the tests of real federations on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.console.flower.local_federation import Ended, LocalFederation
from fedveil.contract.task import Share
from fedveil.federation import inprocess
from fedveil.federation.exchange import Exchange
from fedveil.records import disclosure
from fedveil.records.state import digest
from fedveil.server_app.app import initial
from tests.conftest import ROOT


def lines(path: Path) -> list[dict]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def over_grpc(federation: LocalFederation, at: Path, overrides: Mapping[str, Any], timeout: float = 240) -> Ended:
    """The run in the folder `at`/<method>."""
    here = {"run.dir": str(at), "run.name": overrides["method.name"]}
    return federation.wait(federation.run(ROOT, {**overrides, **here}), timeout=timeout)


def in_process(flat: Mapping[str, Any], data: Path, sites: int) -> inprocess.Federation:
    """The same run in this process, ended."""
    config = parse(dict(flat))
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, "cpu")
    rows = {f"site-{i}": task.encode(task.examples(data, "train", Share(i, sites))) for i in range(sites)}
    weights = initial(method, task, config)
    run = inprocess.Federation(
        Exchange(method, config.method.name, task.spec),
        config,
        lambda site, ctx: task.trainer(rows[site], ctx.rng("batches")),
        sorted(rows),
        method.init(task.spec, weights, rng.initial(config.run.seed, "method init")),
        max_share=config.cohort.max_share,
    )
    run.run()
    return run


def check_same(at: Path, reference: inprocess.Federation, rounds: int) -> None:
    """Weights bit for bit, no site failed, bytes of either direction."""
    metrics, ledger = lines(at / "metrics.jsonl"), disclosure.messages(at / "disclosure.jsonl")
    assert metrics[-1]["weights"] == digest(reference.deployed()["server"])
    assert [m["failed"] for m in metrics[1:]] == [{}] * rounds
    uploads = sum(m.get("upload_bytes", 0) for m in metrics)
    assert abs(uploads - reference.upload_bytes) <= 32 * len(ledger)  # the seconds that a site reports vary in length
    assert sum(m.get("download_bytes", 0) for m in metrics) == reference.download_bytes
    for line in ledger:
        assert line["bytes"] - line["payload_bytes"] < 500 + 30 * len(line["fields"])
