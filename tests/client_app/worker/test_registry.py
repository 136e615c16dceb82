"""Which worker a run gets, by the workers that a site has. No process is started."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.worker import registry
from fedveil.client_app.worker.connection import Connection, WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry

HERE = OwnerProcess(os.getpid(), 1.0)
NODE = {"site": "north", "device": "cpu"}
ORDER = {"round": 0, "is-new": True, "site": "north", "run": "first", "method": "fedavg", "fields": "{}"}
OWN = WorkerRecord("own", 1, HERE, "this app", "this run", 0.0)
SPARE, OTHER = replace(OWN, id="spare", key=""), replace(OWN, id="other", key="other run")
OLD_SPARE = replace(SPARE, id="old spare", app="other app")
FOREIGN = replace(OWN, id="foreign", owner=OwnerProcess(1, 5.0))


@pytest.mark.parametrize(
    "workers,bound,chosen,stopped",
    [
        ([], 0, "new", []),
        ([OTHER, SPARE, OWN], 0, "own", []),
        ([OTHER, OLD_SPARE, SPARE], 0, "spare", []),
        ([OTHER, OLD_SPARE], 0, "new", []),
        ([OTHER, OLD_SPARE], 4000, "new", ["other", "old spare"]),
        ([OTHER, SPARE], 4000, "spare", []),
        ([FOREIGN, SPARE], 0, "spare", ["foreign"]),
    ],
)
def test_a_run_gets_its_own_worker_or_a_spare_or_a_new_one(workers, bound, chosen, stopped, tmp_path, monkeypatch):
    stops: list[str] = []
    monkeypatch.setattr(registry, "run_key", lambda assignment, root: "this run")
    monkeypatch.setattr(registry, "app_digest", lambda root: "this app")
    monkeypatch.setattr(WorkerRegistry, "living", lambda self: list(workers))
    monkeypatch.setattr(WorkerRegistry, "start", lambda self, site, owner, key, root: replace(OWN, id="new", key=key))
    monkeypatch.setattr(Connection, "stop", lambda self, owner: stops.append(self.worker.id))
    node = NODE | {"state-dir": str(tmp_path), "worker-memory-mb": bound}
    connection = WorkerRegistry(tmp_path, "north").find_or_start(
        ClientAssignment.from_instruction(ORDER, {}, node), HERE
    )
    assert (connection.worker.id, connection.worker.key, stops) == (chosen, "this run", stopped)
    assert connection.socket == tmp_path / "workers" / "north" / f"{chosen}.sock"


def test_a_worker_that_ends_while_workers_are_listed_is_none(tmp_path):
    """It removes its files without the lock: here they are gone between their listing and their reading."""
    folder = WorkerRegistry(tmp_path, "north")
    folder.path.mkdir(parents=True)
    for name in ("ended.json", "ended.noted"):
        (folder.path / name).symlink_to(folder.path / "gone")
    assert folder.living() == []
