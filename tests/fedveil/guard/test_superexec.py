"""A SuperExec and an app's process that are answered with an error once: they go on, beside Flower's own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.plugin import AutoExecPlugin

from fedveil.guard import clientapp, heartbeat, serverapp, superexec, task_programs
from tests.conftest import ROOT

_OURS = "from fedveil.guard.superexec import main; main()"
_FLOWERS = "from flwr.supercore.cli import flower_superexec; flower_superexec()"


class Runtime:
    """A SuperLink's runtime port, which says at the second question that its database is locked."""

    def __init__(self) -> None:
        runtime, self.asked = self, 0
        self.types: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                runtime.types |= set(AcquireTaskRequest.FromString(body).supported_task_types)
                runtime.asked += 1
                body = AcquireTaskResponse().SerializeToString()
                self.send_response(500 if runtime.asked == 2 else 200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing: a line for each question."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.server.shutdown()


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program,goes_on", [(_OURS, True), (_FLOWERS, False)], ids=["ours", "flower's"])
def test_a_superexec_asks_again_after_an_error_of_its_superlink(
    tmp_path: Path, runtime: Runtime, program: str, goes_on: bool
) -> None:
    address = f"127.0.0.1:{runtime.server.server_address[1]}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "--insecure", "--runtime-api-address", address],
            env=env, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while runtime.asked < (5 if goes_on else 2) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if goes_on:
            assert runtime.asked >= 5, (tmp_path / "log").read_text()[-2000:]
            assert process.poll() is None
            assert runtime.types == {"flwr-serverapp"}
        else:
            assert process.wait(30) != 0
            assert runtime.types == set(TaskType)
    finally:
        process.kill()
        process.wait(20)


def test_every_type_of_task_of_flower_is_guarded_or_has_a_program_that_is_refused() -> None:
    """A new type in a later Flower turns this red: decide then what the guard does with it."""
    guarded = {task_programs.CLIENT_APP, task_programs.SERVER_APP}
    assert {TASK_TYPE_TO_COMMAND[kind] for kind in TaskType} == guarded | set(task_programs.REFUSED_PROGRAMS)
    assert guarded <= set(TaskType)


@pytest.mark.parametrize("permitted", [task_programs.CLIENT_APP, task_programs.SERVER_APP])
def test_a_superexec_starts_one_type_of_task_and_no_other(monkeypatch: pytest.MonkeyPatch, permitted: str) -> None:
    monkeypatch.setattr(AutoExecPlugin, "supported_task_types", AutoExecPlugin.supported_task_types)  # puts it back
    superexec.patch_task_types(permitted)

    class Executor:
        def launch(self, spec: Any) -> LaunchResult:
            started.append(spec.task_type)
            return LaunchResult.accepted()

    plugin = AutoExecPlugin("127.0.0.1:1", True, None, executor=Executor())  # type: ignore[arg-type]
    assert plugin.supported_task_types == {permitted}
    for kind in TaskType:
        started: list[str] = []
        plugin.launch_task("token", Task(task_id=1, type=kind, run_id=7))
        assert started == ([kind] if kind == permitted else []), kind


@pytest.mark.parametrize("name", ["FEDVEIL_INSTRUCTION_KEY", "FEDVEIL_SIGNERS", "FEDVEIL_BUNDLES"])
def test_an_images_superexec_is_a_sites_unless_its_environment_is_a_servers(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in ("FEDVEIL_INSTRUCTION_KEY", "FEDVEIL_SIGNERS", "FEDVEIL_BUNDLES"):
        monkeypatch.delenv(other, raising=False)
    assert superexec.task_type_of_environment() == task_programs.CLIENT_APP
    monkeypatch.setenv(name, "")
    assert superexec.task_type_of_environment() == task_programs.CLIENT_APP
    monkeypatch.setenv(name, "/instruct/file")
    assert superexec.task_type_of_environment() == task_programs.SERVER_APP


@pytest.mark.parametrize("module", [clientapp.RUNTIME, serverapp.RUNTIME])
def test_an_apps_process_has_the_sender_that_goes_on(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    loaded = importlib.import_module(module)
    monkeypatch.setattr(loaded, "HeartbeatSender", loaded.HeartbeatSender)  # puts it back
    heartbeat.patch_task_heartbeat(module)
    assert loaded.HeartbeatSender is heartbeat.TaskHeartbeatSender
    assert issubclass(heartbeat.TaskHeartbeatSender, heartbeat.PersistentHeartbeatSender)
