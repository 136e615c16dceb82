"""A real federation on this machine: SuperLink, three SuperNodes, gRPC, TLS, node keys; real text, real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import strategies
from console.launch import Federation, Site
from fedveil import inprocess, rng, tasks
from fedveil.config import parse
from fedveil.exchange import Exchange
from fedveil.state import digest
from fedveil.tasks.base import Share
from tests.conftest import ROOT

DATA = ROOT / "data" / "e2e"
SITES = 3
CONFIG = {
    "run.deterministic": True,
    "run.seed": 4,
    "run.rounds": 2,
    "task.evaluation": str(DATA),
    "train.max-steps": 3,
    "train.batch-size": 4,
    "evaluate.max-examples": 4,
    "evaluate.generate": "never",
    "cohort.fraction": 0.6,
    "cohort.sites": SITES,
    "cohort.deadline-seconds": 200.0,
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sites = [Site(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", SITES))) for i in range(SITES)]
    with Federation(sites, tmp_path_factory.mktemp("federation")) as running:
        yield running
    assert running.processes.alive() == []


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_process(method_name: str) -> inprocess.Federation:
    """The same run without Flower."""
    config = parse(CONFIG | {"method.name": method_name})
    method = strategies.create(method_name)
    task = tasks.load(config, method.adapter, "cpu")
    rows = {f"site-{i}": task.prepare(task.examples(DATA, "train", Share(i, SITES))) for i in range(SITES)}
    state = method.init(task.spec, task.initial(rng.initial(4, "weights")), rng.initial(4, "method init"))
    run = inprocess.Federation(
        Exchange(method, method_name, task.spec),
        config,
        lambda site, ctx: task.local(rows[site], ctx.rng("batches")),
        sorted(rows),
        state,
    )
    run.run()
    return run


@pytest.mark.timeout(280)
@pytest.mark.parametrize("method,worker", [("fedavg", False), ("fedrand", True)])
def test_grpc_and_in_process_end_bit_identical(method, worker, federation, tmp_path):
    overrides = CONFIG | {"method.name": method, "run.dir": str(tmp_path), "run.name": method, "client.worker": worker}
    ended = federation.wait(federation.run(ROOT, overrides), timeout=240)
    assert ended.completed, ended.reason
    metrics, ledger = lines(tmp_path / method / "metrics.jsonl"), lines(tmp_path / method / "disclosure.jsonl")
    reference = in_process(method)
    assert metrics[-1]["weights"] == digest(reference.deployed()["server"])
    assert [m["failed"] for m in metrics[1:]] == [{}, {}]
    uploads = sum(m.get("upload_bytes", 0) for m in metrics)
    assert abs(uploads - reference.upload_bytes) <= 32 * len(ledger)  # the seconds that a site reports vary in length
    assert sum(m.get("download_bytes", 0) for m in metrics) == reference.download_bytes
    for line in ledger:
        assert line["bytes"] - line["payload_bytes"] < 2000
        if method == "fedrand" and line["direction"] == "up":
            assert {name[-1] for name, *_ in line["fields"]} == {line["variant"]}


@pytest.mark.timeout(120)
def test_a_bad_field_fails_the_run_in_one_line_before_any_site_is_asked(federation, tmp_path):
    overrides = CONFIG | {"method.fields": "rho = 1.5", "run.dir": str(tmp_path), "run.name": "bad"}
    ended = federation.wait(federation.run(ROOT, overrides), timeout=100)
    assert not ended.completed
    status = json.loads((tmp_path / "bad" / "status.json").read_text())
    assert status["reason"] == "rho: expected a probability from 0 to 1, found 1.5"
    assert not (tmp_path / "bad" / "disclosure.jsonl").exists()
