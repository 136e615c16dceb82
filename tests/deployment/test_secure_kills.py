"""Sites that are killed in a secure run over gRPC: one while it trains, another between its upload and its shares.

Both happen in one round of five sites, of which three must agree to a sum. FedRand and FedQSN send their entries by a
table, so a site masks once in a round.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.runs.workers import list_workers
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.deployment.loopback import build_in_process, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TEXT = ROOT / "data" / "e2e"
NAMES = tuple(f"site-{i}" for i in range(5))
# Killed after its upload; killed while it trains; stopped meanwhile. A deterministic run reads uploads in this order.
UPLOADED, TRAINING, HELD = "site-0", "site-1", "site-4"
SUMMED = (set(NAMES) - {TRAINING}, set(NAMES) - {UPLOADED})  # in the first round and in the second
SECONDS = 600  # at most until something happens, on a machine that has much else to do
SECURE = {
    "secure.enabled": True, "secure.min-sites": 3, "secure.threshold": 3, "secure.max-colluders": 0,
    "cohort.sites": 5, "cohort.min-sites": 3, "cohort.max-retries": 0, "cohort.deadline-seconds": 900.0,
    "run.rounds": 2, "train.max-steps": 8, "evaluate.every": 0,
}  # fmt: skip


def secure_run(flat: Mapping[str, Any], data: Path, at: Path) -> list[dict[str, Any]]:
    """Run two rounds of five guarded sites, kill two sites in the first, and return the rounds' records.

    TRAINING is killed while it trains, and started again once Flower takes it for dead, which takes a minute. Then
    UPLOADED is killed, whose upload the server has. Until then HELD is stopped, so that the server still waits and has
    asked nobody for shares. Three of the four sites in the sum are left to open it.
    """
    run_folder = at / str(flat["method.name"])
    folders = {name: at / "federation" / "sites" / name for name in NAMES}

    def progress() -> dict[str, Any]:
        return json.loads((run_folder / "progress.json").read_text())

    sites = [LocalSite(name, data) for name in NAMES]
    with LocalDeployment(sites, at / "federation", guarded=True, start_timeout=SECONDS) as federation:
        run = federation.run(ROOT, {**flat, "run.dir": str(at), "run.name": run_folder.name})
        stopped = {name: stop_once_training(folders[name]) for name in (TRAINING, HELD)}
        assert [events(folders[name], "masked") for name in stopped] == [[], []]
        federation.kill_site(TRAINING)
        until(lambda: TRAINING in progress()["reasons"], SECONDS, "the server goes on without the site", 0.1)
        federation.start_site(TRAINING)
        until(lambda: federation.online(TRAINING), SECONDS, "it is online again", 0.1)
        until(lambda: progress()["waiting"] == [HELD], SECONDS, "the server waits for the stopped site alone", 0.1)
        federation.kill_site(UPLOADED)
        os.kill(stopped[HELD], signal.SIGCONT)
        ended = federation.wait(run, timeout=900)
        assert ended.completed, ended.reason
    assert federation.processes.alive() == []
    records = [record for record in lines(run_folder / "metrics.jsonl") if record["round"] >= 0]
    assert [set(record["accepted"]) for record in records] == list(SUMMED)
    assert list(records[0]["failed"]) == [TRAINING]
    assert [record["unseen"]["sites"] for record in records] == [4, 4]
    assert [list(record["unseen"]["deaf"]) for record in records] == [[UPLOADED], []]
    assert [record["reports"] for record in records] == [{}, {}]
    check_logs(folders)
    return records


def stop_once_training(folder: Path) -> int:
    """Wait until a site trains, and stop its worker. Return the worker's process id.

    A worker that is stopped earlier may not have answered its client process, which then gives it up.
    """
    training: list[int] = []

    def is_training() -> bool:
        training.extend(worker.card.pid for worker in list_workers(folder) if worker.says["state"] == "training")
        return bool(training)

    until(is_training, SECONDS, f"{folder.name} trains", 0.02)
    os.kill(training[0], signal.SIGSTOP)
    return training[0]


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    log = folder / audit_log.NAME
    return [line for line in audit_log.read_log(log) if line["event"] == event] if log.exists() else []


def check_logs(folders: Mapping[str, Path]) -> None:
    """The sites of each round's sum masked for one plan and opened one list, and no site refused a request."""
    seen = {
        event: [(line["round"], name, line["plan"]) for name in NAMES for line in events(folders[name], event)]
        for event in ("masked", "signed", "opened")
    }
    for round_, in_sum in enumerate(SUMMED):
        (plan,) = {plan for at, _, plan in seen["masked"] if at == round_}
        by = {event: sorted(name for _, name, p in lines_ if p == plan) for event, lines_ in seen.items()}
        assert by["masked"] == sorted(in_sum)
        assert set(by["signed"]) <= in_sum - {UPLOADED}
        assert set(by["opened"]) <= in_sum - {UPLOADED}
        assert len(by["opened"]) >= 3
    assert [name for name in NAMES if events(folders[name], "sum-refused")] == []


@pytest.mark.parametrize(
    ("method", "params"), [("fedrand", ""), ("fedqsn", "server_rate = 0.1\nclient_rate = 0.1\nbits = 4")]
)
def test_sums_of_partial_uploads_are_those_of_the_sites_that_were_there(method, params, tmp_path):
    flat = SECURE | {
        "method.name": method, "method.params": params, "run.seed": 4, "run.deterministic": True,
        "train.batch-size": 4, "evaluate.eval-examples": 4, "evaluate.generate": "never", "task.evaluation": str(TEXT),
    }  # fmt: skip
    records = secure_run(flat, TEXT, tmp_path)
    for name in NAMES:
        assert all(line["entries"] for line in events(tmp_path / "federation" / "sites" / name, "masked"))
    reference, digests = build_in_process(flat, TEXT, len(NAMES)), []
    for record in records:
        reference.sites, reference.silent = record["cohort"], set(record["cohort"]) - set(record["accepted"])
        reference.round(record["round"])
        digests.append(state_digest(reference.models()["server"]))
    assert [record["weights"] for record in records] == digests
