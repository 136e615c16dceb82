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

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskResponse

from fedveil.guard import clientapp, heartbeat, serverapp
from tests.conftest import ROOT

_OURS = "from fedveil.guard.superexec import main; main()"
_FLOWERS = "from flwr.supercore.cli import flower_superexec; flower_superexec()"


class Runtime:
    """A SuperLink's runtime port, which says at the second question that its database is locked."""

    def __init__(self) -> None:
        runtime, self.asked = self, 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
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
        else:
            assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize("module", [clientapp.RUNTIME, serverapp.RUNTIME])
def test_an_apps_process_has_the_sender_that_goes_on(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    loaded = importlib.import_module(module)
    monkeypatch.setattr(loaded, "HeartbeatSender", loaded.HeartbeatSender)  # puts it back
    heartbeat.patch_task_heartbeat(module)
    assert loaded.HeartbeatSender is heartbeat.PersistentHeartbeatSender
