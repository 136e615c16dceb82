"""Sites that are killed in a secure run over gRPC: one while it trains, one between its upload and its shares.

With FedRand, whose sites send different entries by a table, so that a site masks at most once in a round.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.records import audit_log
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.deployment.loopback import lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TEXT = ROOT / "data" / "e2e"
NAMES = tuple(f"site-{i}" for i in range(4))
TRAINING, UPLOADED = "site-3", "site-0"  # when they are killed
ROUNDS = 16
SECONDS = 600  # at most until something happens, on a machine that has much else to do
SECURE = {
    "secure.enabled": True, "secure.min-sites": 3, "cohort.sites": 4, "cohort.min-sites": 3, "cohort.max-retries": 3,
    "cohort.deadline-seconds": 900.0, "run.rounds": ROUNDS, "train.max-steps": 20, "evaluate.every": 0,
}  # fmt: skip


def secure_run(flat: Mapping[str, Any], data: Path, at: Path) -> list[dict[str, Any]]:
    """Run rounds of four guarded sites and kill two of them; return the records of all attempts.

    TRAINING is killed while it trains in round 0 and started again: Flower takes a killed SuperNode for connected for
    a minute, and refuses its successor as long, so some rounds go on without it. Once it has taken part again,
    UPLOADED is killed when the server has its upload and still waits for another: it opens no share of that round.
    """
    run_folder = at / str(flat["method.name"])
    folders = {name: at / "federation" / "sites" / name for name in NAMES}

    def progress() -> dict[str, Any]:
        return json.loads((run_folder / "progress.json").read_text())

    def is_waited_for(name: str) -> bool:
        now = progress()
        others_left = [other for other in now["waiting"] if other != name]
        is_in = name not in now["waiting"] and name not in now["reasons"]
        return now["phase"] == "round" and now["asked"] == 4 and bool(others_left) and is_in

    with LocalDeployment([LocalSite(name, data) for name in NAMES], at / "federation", guarded=True) as federation:
        run = federation.run(ROOT, {**flat, "run.dir": str(at), "run.name": run_folder.name})
        until(lambda: is_served(folders[TRAINING]), SECONDS, "round 0 has begun at the site", 0.02)
        stop_worker(folders[TRAINING])  # at once: to find all processes of a site takes a moment
        assert uploads(folders[TRAINING]) == []
        federation.kill_site(TRAINING)
        until(lambda: TRAINING in progress()["reasons"], SECONDS, "the server goes on without the site", 0.1)
        federation.start_site(TRAINING)
        until(lambda: uploads(folders[TRAINING]) != [], SECONDS, "it has taken part again", 0.1)
        until(lambda: is_waited_for(UPLOADED), SECONDS, "the server has one upload and waits for another", 0.02)
        federation.kill_site(UPLOADED)
        ended = federation.wait(run, timeout=900)
        assert ended.completed, ended.reason
    assert federation.processes.alive() == []
    records = [record for record in lines(run_folder / "metrics.jsonl") if record["round"] >= 0]
    assert (records[0]["accepted"], list(records[0]["failed"])) == (sorted(NAMES[:3]), [TRAINING])
    assert any(TRAINING in record["accepted"] for record in records)
    assert UPLOADED in records[-1]["failed"] or UPLOADED not in records[-1]["cohort"]
    for record in records:
        assert record["reports"] == {}
        assert record["weights"] == "" or record["unseen"]["sites"] == len(record["accepted"]) >= 3
    return records


def stop_worker(folder: Path) -> None:
    registry = WorkerRegistry(folder, folder.name)
    with registry.locked():
        (worker,) = registry.living()
    os.kill(worker.pid, signal.SIGSTOP)


def is_served(folder: Path) -> bool:
    """Return whether a site has begun to train."""
    return any(folder.glob("*/*/served.json"))


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    log = folder / audit_log.NAME
    return [line for line in audit_log.read_log(log) if line["event"] == event] if log.exists() else []


def uploads(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a site's masked uploads."""
    return [line for line in events(folder, "sent") if [name for name, _ in line["fields"]] == ["attached", "sum"]]


def test_fedrand_goes_on_with_the_sites_that_are_there(tmp_path):
    flat = SECURE | {
        "method.name": "fedrand", "run.seed": 4, "run.deterministic": True, "train.batch-size": 4,
        "evaluate.eval-examples": 4, "evaluate.generate": "never", "task.evaluation": str(TEXT),
    }  # fmt: skip
    assert len(secure_run(flat, TEXT, tmp_path)) >= 16  # every round, and the attempts that had no sum
    check_logs(tmp_path / "federation" / "sites")


def check_logs(sites: Path) -> None:
    """No site masked twice for one plan, or opened two lists of it, or was asked for what it must refuse."""
    for name in NAMES:
        masked = events(sites / name, "masked")
        assert len({line["plan"] for line in masked}) == len(masked) > 0
        assert all(line["entries"] for line in masked)
        opened = {(line["plan"], line["list"]) for line in events(sites / name, "opened")}
        assert len({plan for plan, _ in opened}) == len(opened) > 0
        assert events(sites / name, "sum-refused") == []
