"""A task whose program starts slowly stays claimed; Flower alone lets it be claimed again after 30 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import psutil
import pytest
from flwr.proto.runtime_pb2 import SendTaskHeartbeatResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.superexec.executor import subprocess_executor

from fedveil.guard.flower import task_claims
from tests.fedveil.guard.flower.states import Superlink, copy_superlink

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's, of a new database
_ARGUMENTS = ["flwr-clientapp", "--runtime-api-address", "127.0.0.1:1", "--token", "secret", "--insecure"]


def _wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    assert what()


@pytest.mark.parametrize("module", [in_memory_corestate, sql_corestate], ids=["memory", "sql"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_heartbeat_keeps_a_task_that_starts(monkeypatch, tmp_path, clean_database, module, is_kept):
    """Flower's own states: without a heartbeat, a task that starts for 100 s is claimed a second time."""
    made = (
        Superlink() if module is in_memory_corestate else copy_superlink(clean_database, tmp_path / "state.db", False)
    )
    state = made.state
    (task,) = state.get_tasks()
    began, later = module.now(), timedelta()
    monkeypatch.setattr(module, "now", lambda: began + later)
    assert task.type == TaskType.SERVER_APP
    assert state.claim_task(task.task_id)
    assert state.claim_task(task.task_id) is None
    for seconds in (20, 65, 100):
        later = timedelta(seconds=seconds)
        if is_kept and seconds < 100:
            assert state.acknowledge_task_heartbeat(task.task_id)
    state.acknowledge_task_heartbeat(1)  # Flower releases tasks at calls such as this one
    assert (state.claim_task(task.task_id) is None) == is_kept


class Runtime:
    """A runtime port that counts heartbeats, and answers them as told."""

    def __init__(self) -> None:
        runtime, self.tokens, self.status, self.success = self, [], 200, True

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                runtime.tokens.append((self.path.rsplit("/", 1)[-1], self.headers.get("flwr-task-token", "")))
                body = SendTaskHeartbeatResponse(success=runtime.success).SerializeToString()
                self.send_response(runtime.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.arguments = [*_ARGUMENTS[:2], f"127.0.0.1:{self.server.server_address[1]}", *_ARGUMENTS[3:]]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = Runtime()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_heartbeats_have_the_tasks_token_and_end_with_its_program(runtime):
    claim = task_claims.TaskClaim(task_claims.TaskHeartbeat(runtime.arguments), first=0.05, every=0.05)
    _wait_for(lambda: len(runtime.tokens) >= 3)
    assert set(runtime.tokens) == {("send-task-heartbeat", "secret")}
    claim.is_alive = lambda: False
    time.sleep(0.3)
    count = len(runtime.tokens)
    time.sleep(0.3)
    assert len(runtime.tokens) == count


@pytest.mark.parametrize(("status", "success"), [(401, True), (500, True), (200, False)])
def test_a_refused_heartbeat_is_the_last(runtime, status, success):
    runtime.status, runtime.success = status, success
    assert task_claims.TaskHeartbeat(runtime.arguments)() is False
    task_claims.TaskClaim(task_claims.TaskHeartbeat(runtime.arguments), first=0.02, every=0.02)
    _wait_for(lambda: len(runtime.tokens) == 2)
    time.sleep(0.3)
    assert len(runtime.tokens) == 2


def test_no_answer_is_no_refusal_and_the_time_is_bounded():
    sent = []
    send = task_claims.TaskHeartbeat(_ARGUMENTS)
    task_claims.TaskClaim(lambda: (sent.append(send()), True)[1], first=0.01, every=0.01, longest=0.055)
    _wait_for(lambda: len(sent) == 5)
    time.sleep(0.2)
    assert sent == [True] * 5


def test_a_program_is_watched_by_its_process_and_a_forked_one_by_its_number(monkeypatch):
    claims = []

    class Claim:
        def __init__(self, send: Callable[[], bool]) -> None:
            self.is_alive: Callable[[], bool] = lambda: True
            claims.append(self)

    monkeypatch.setattr(task_claims, "TaskClaim", Claim)
    task_claims.start_claimed([sys.executable, "-c", "import sys; sys.stdin.read()", "--token", "x"], stdin=-1)
    assert claims[0].is_alive()
    alive = (c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE)
    (child,) = (c for c in alive if c.cmdline()[-2:] == ["--token", "x"])
    child.kill()
    _wait_for(lambda: not claims[0].is_alive())
    other = psutil.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    task_claims.start_claimed(_ARGUMENTS, lambda arguments: other.pid if arguments == _ARGUMENTS[1:] else 0)
    assert claims[1].is_alive()
    other.kill()
    other.wait()
    assert not claims[1].is_alive()


def test_a_program_that_cannot_be_started_keeps_no_claim(monkeypatch, tmp_path):
    claims = []
    monkeypatch.setattr(task_claims, "TaskClaim", lambda send: claims.append(SimpleNamespace()) or claims[0])
    with pytest.raises(FileNotFoundError):
        task_claims.start_claimed([str(tmp_path / "absent"), *_ARGUMENTS[1:]])
    assert not claims[0].is_alive()


def test_a_servers_superexec_starts_every_program_so(monkeypatch):
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess_executor.subprocess)  # put back afterwards
    task_claims.patch_subprocesses()
    assert subprocess_executor.subprocess.Popen is task_claims.start_claimed
    assert subprocess_executor.subprocess.DEVNULL == -3
