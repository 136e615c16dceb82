"""How turns and workers end: by the order's time, with their SuperNode, idle, beyond their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import grpc
import psutil
import pytest

from fedveil.client_app import app as client
from fedveil.client_app.worker import connection
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.contract.task import TrainingProgress
from fedveil.errors import ConfigError, WorkerError
from tests.client_app.worker.bench import HERE, gone, unbroken, until


@pytest.mark.long
def test_a_turn_whose_upload_never_came_leaves_nothing_behind(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    before = dict(bench.last)
    bench.turn(1)
    bench.last = before  # the server died before it had a checkpoint with that upload
    uploads.append(bench.turn(1))
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_a_turn_whose_worker_is_stopped_ends_with_the_order_s_time_and_the_next_one_goes_on(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    (worker,) = bench.workers()
    os.kill(worker.pid, signal.SIGSTOP)
    bench.seconds = 1.0
    began = time.monotonic()
    with pytest.raises(
        connection.ClientRoundError,
        match="client round: it took more than 1 s and was ended",
    ):
        bench.turn(1)
    assert time.monotonic() - began < 10
    assert until(lambda: gone(worker.pid))
    assert bench.workers() == []
    bench.seconds = 600.0
    uploads.append(bench.turn(1))
    assert uploads == whole.uploads


@pytest.mark.long
def test_a_turn_that_is_too_slow_ends_with_the_order_s_time(bench):
    bench.turn(0)
    bench.orders(steps=1000, pause=0.05)
    bench.seconds = 1.5
    with pytest.raises(connection.ClientRoundError, match="took more than 1.5 s"):
        bench.turn(1)
    assert bench.workers() == []


def test_a_turn_without_a_worker_ends_with_the_order_s_time_too():
    watch = client._until(0.2)
    watch(TrainingProgress(1, 9, 0.0, 0, 0.0))
    time.sleep(0.3)
    with pytest.raises(WorkerError, match="took more than 0.2 s"):
        watch(TrainingProgress(2, 9, 0.0, 0, 0.0))


def test_a_step_of_the_clock_does_not_part_a_worker_from_its_supernode(monkeypatch):
    """psutil reckons start times by the clock; here the clock is set on by an hour."""
    before = OwnerProcess.from_pid(os.getpid())
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) + 3600)
    assert before.is_(OwnerProcess.from_pid(os.getpid()))
    assert before.runs()
    assert not OwnerProcess(before.pid, before.created - 10).runs()


@pytest.fixture
def another():
    """Another SuperNode's process."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.long
def test_another_supernode_of_the_same_site_cannot_reach_the_worker(bench, another):
    bench.turn(0)
    (worker,) = bench.workers()
    with pytest.raises(ConfigError, match=f"two SuperNodes use it for site north, this one and process {os.getpid()}"):
        bench.turn(1, owner=OwnerProcess.from_pid(another.pid))
    for metadata in ((("owner", str(OwnerProcess.from_pid(another.pid))),), ()):
        with bench.folder.connect(worker).open_channel() as channel:
            answers = channel.stream_stream("/fedveil.Worker/Take")(iter([b"{}"]), metadata=metadata)
            with pytest.raises(grpc.RpcError) as refused:
                next(answers)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert bench.workers() == [worker]


@pytest.mark.long
def test_a_worker_ends_with_its_supernode_and_leaves_no_file(bench, another):
    bench.turn(0, owner=OwnerProcess.from_pid(another.pid))
    (worker,) = bench.workers()
    another.kill()
    another.wait()
    assert until(lambda: gone(worker.pid), 3.0)
    assert sorted(p.name for p in bench.folder.path.iterdir()) == ["lock", "turns.jsonl", "worker.log"]
    assert bench.turn(1)  # of the SuperNode that came after


@pytest.mark.long
def test_an_idle_worker_ends(bench):
    bench.turn(0, worker_idle_seconds=0.5)
    (worker,) = bench.workers()
    assert until(lambda: gone(worker.pid), 5.0)
    assert bench.workers() == []
    assert "idle for 0.5 s" in bench.folder.log.read_text()


@pytest.mark.long
def test_beyond_its_memory_the_turn_fails_and_the_worker_ends(bench):
    bench.orders(hold_mb=600)
    with pytest.raises(
        connection.ClientRoundError, match="worker-memory-mb: the worker uses .* MB, above its limit of 500"
    ) as error:
        bench.turn(0, worker_memory_mb=500)
    assert error.value.kind == "OutOfMemoryError"
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"
    (end,) = bench.ends()
    assert end["round"] == 0
    assert "raise the limit in the node config; give the site more memory, or lower train.batch-size" in end["failed"]
    assert until(lambda: bench.workers() == [])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["MemoryError", "RuntimeError"])
def test_an_allocation_that_fails_is_called_want_of_memory(kind, bench):
    bench.orders(raises=kind, words="DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(connection.ClientRoundError, match="can't allocate memory; give the site more memory") as error:
        bench.turn(0)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"


@pytest.mark.long
@pytest.mark.parametrize("kind,stays", [("TaskError", True), ("ValueError", False)])
def test_after_an_error_that_nobody_foresaw_the_worker_ends(kind, stays, bench):
    bench.orders(raises=kind)
    with pytest.raises(connection.ClientRoundError, match="row 4711") as error:
        bench.turn(0)
    assert error.value.kind == kind
    assert "row 4711" in bench.folder.log.read_text()
    error_kind, text = client.private_reason(error.value)
    assert (error_kind, text.startswith("row 4711")) == (kind, True)
    assert (f"its traceback is in {bench.folder.log}" in text) == (not stays)
    assert str(bench.folder.path) not in client.public_reason(error.value)
    if stays:
        assert len(bench.workers()) == 1
    else:
        assert until(lambda: bench.workers() == [])


@pytest.mark.long
def test_a_turn_whose_caller_has_gone_is_given_up(bench):
    bench.orders(pause=0.1, steps=1000)
    assignment = bench.assignment()
    found = bench.folder.find_or_start(assignment, HERE, bench.app)
    with found.open_channel() as channel:
        head = {"assignment": assignment.to_json(), "key": found.worker.key, "bytes": len(bench.message())}
        requests = iter([json.dumps(head).encode(), bench.message()])
        call = channel.stream_stream("/fedveil.Worker/Take")(requests, metadata=(("owner", str(HERE)),))
        status = channel.unary_unary("/fedveil.Worker/Status")
        assert until(lambda: json.loads(status(b""))["state"] == "training", 120.0)
        worker_status = json.loads(status(b""))
        expected = {"run": "first", "round": 0, "steps": 1000, "model": "toy-base"}
        assert {k: worker_status[k] for k in expected} == expected
        assert worker_status["step"] >= 1
        assert worker_status["tokens_per_second"] == 200
        assert worker_status["seconds_left"] == 0.5 * (1000 - worker_status["step"])  # half a second a step, so far
        assert worker_status["memory_mb"] > 50
        call.cancel()
        assert until(lambda: json.loads(status(b""))["state"] == "idle")
    assert bench.private() is None
    bench.orders()
    assert bench.turn(0)
