"""The imports of a worker that starts before its first turn."""

from __future__ import annotations

import json
import os
import threading
import types
from pathlib import Path

import pytest

from fedveil.client_app.instruction import ClientAssignment, TrainInstruction
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.worker import worker_main
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.client_app.worker.service import WorkerService
from fedveil.config import parse
from fedveil.errors import WorkerError


class Taken(Exception):
    """The turn has begun."""


class _Session:
    def run_round(self, *_args: object) -> None:
        raise Taken


@pytest.fixture
def service(tmp_path: Path) -> WorkerService:
    worker_service = WorkerService(WorkerRegistry(tmp_path, "north"), OwnerProcess.from_pid(os.getpid()), 0)
    worker_service._session = _Session()  # type: ignore[assignment]
    return worker_service


def _begun(service: WorkerService, tmp_path: Path) -> None:
    config = parse({"run.deterministic": True, "task.name": "toy", "task.model": "toy-base"})
    order = TrainInstruction(0, True, "north", "first", "fedavg", "{}", last="")
    assignment = ClientAssignment(order, config, SiteConfig(site="north", data=str(tmp_path), device="cpu"))
    head = {"key": "first", "assignment": assignment.to_json(), "bytes": 1}
    with pytest.raises(Taken):
        service._turn(iter([json.dumps(head).encode()]), types.SimpleNamespace())  # type: ignore[arg-type]


def test_a_turn_begins_once_the_imports_are_there(service: WorkerService, tmp_path: Path) -> None:
    _begun(service, tmp_path)  # where nothing is preloaded, at once
    service.loaded.clear()
    turn = threading.Thread(target=_begun, args=(service, tmp_path))
    turn.start()
    turn.join(0.5)
    assert turn.is_alive()
    service.loaded.set()
    turn.join(30.0)
    assert not turn.is_alive()


@pytest.mark.parametrize("error", [ImportError("no such library"), WorkerError("anything else")])
def test_imports_that_fail_do_not_hold_the_turn_which_reports_them(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_module: str) -> None:
        raise error

    monkeypatch.setattr(worker_main.importlib, "import_module", fails)
    loaded = threading.Event()
    if isinstance(error, ImportError):
        worker_main.preload_modules(loaded)
    else:
        with pytest.raises(WorkerError):
            worker_main.preload_modules(loaded)
    assert loaded.is_set()


def test_the_event_comes_after_the_last_import(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, seen = threading.Event(), []
    monkeypatch.setattr(worker_main.importlib, "import_module", lambda module: seen.append((module, loaded.is_set())))
    worker_main.preload_modules(loaded)
    assert [module for module, _ in seen] == list(worker_main._HEAVY)
    assert not any(was_set for _, was_set in seen)
    assert loaded.is_set()
