"""A worker that is killed or fails: what is repeated, what the site and the server are told, and what stays."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest

from fedveil.client_app import app as client
from fedveil.client_app.worker import connection, registry
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.errors import WorkerError
from fedveil.records import process_exit
from fedveil.wire.chunking import slice_message
from tests.client_app.worker.bench import HERE, unbroken, until
from tests.memory_group import memory_group


def grouped_python(tmp_path: Path, group: Path) -> str:
    """A python in a memory cgroup."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def shell_python(tmp_path: Path, deaths: int) -> str:
    """A python that kills itself at its first starts."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nn=$(ls {tmp_path}/start-* 2>/dev/null | wc -l)\nif [ "$n" -lt {deaths} ]; then\n'
        f'  touch {tmp_path}/start-$n; kill -9 $$\nfi\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.long
def test_killed_at_start_one_more_is_started(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shell_python(tmp_path, 1))
    assert bench.turn()


def test_killed_at_start_twice_is_an_error_that_names_the_log(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shell_python(tmp_path, 2))
    with pytest.raises(WorkerError, match="it ended with exit code -9 before it was ready; see .*worker.log"):
        bench.turn()
    assert bench.workers() == []


def test_killed_for_memory_before_it_listens_the_server_is_told_too(bench, tmp_path, monkeypatch):
    with memory_group(10) as group:
        monkeypatch.setattr(sys, "executable", grouped_python(tmp_path, group))
        monkeypatch.setattr(process_exit, "_group", lambda: group)  # that of this process, as in a container
        with pytest.raises(
            registry.WorkerDiedError, match="exit code -9, out of memory; give the site more memory"
        ) as error:
            bench.turn()
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"


@pytest.mark.long
def test_killed_in_training_the_turn_is_repeated_once_and_ends_as_if_unbroken(bench, tmp_path):
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2)
    uploads = [bench.turn(0)]
    bench.orders(deaths=1)
    uploads.append(bench.turn(1))
    assert (bench.data / "died-0").exists()
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_killed_in_training_twice_is_an_error_and_the_private_state_stays(bench):
    bench.turn(0)
    before = bench.private()
    bench.orders(deaths=2)
    gone = r"it sent no upload, and is gone after .* \(UNAVAILABLE\): SIGKILL: killed, .* MB at its last report; its"
    with pytest.raises(registry.WorkerDiedError, match=gone) as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: killed or crashed"
    assert [line["round"] for line in bench.ends() if re.search(gone, line.get("failed", ""))] == [1, 1]
    assert bench.private() == before
    assert bench.workers() == []
    bench.orders()
    assert bench.turn(1)


@pytest.mark.long
def test_killed_for_memory_by_the_kernel_the_site_is_told_what_to_lower_and_the_server_no_figure(
    bench, tmp_path, monkeypatch
):
    bench.orders(hold_mb=3000)
    with memory_group(800) as group:
        monkeypatch.setattr(sys, "executable", grouped_python(tmp_path, group))
        with pytest.raises(registry.WorkerDiedError) as error:
            bench.turn(0)
    pattern = r"SIGKILL: killed by the kernel because memory ran out: \d+ of (799|800) MB at its last report; .*batch"
    assert re.search(pattern, str(error.value)), error.value
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: out of memory"
    assert [bool(re.search(pattern, line["failed"])) for line in bench.ends()] == [True, True]


@pytest.mark.long
def test_a_worker_that_nobody_here_started_is_judged_by_what_it_noted(bench, monkeypatch):
    """It was started by an earlier client process, so its exit signal is not for this one."""
    bench.turn(0)
    bench.orders(deaths=2)
    much = process_exit.note_memory() | {"peak_mb": 980, "limit_mb": 1000}
    monkeypatch.setattr(WorkerRegistry, "noted", lambda self, worker: much)
    monkeypatch.setattr(registry, "_exit_code", lambda pid: None)
    with pytest.raises(
        registry.WorkerDiedError, match="killed, probably because memory ran out: 980 of 1000 MB"
    ) as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: probably out of memory"
    assert registry._exit_code(os.getppid()) is None


@pytest.mark.long
def test_a_crash_is_not_taken_for_want_of_memory(bench, monkeypatch):
    bench.turn(0)
    bench.orders(deaths=2, die_by="SIGSEGV")
    monkeypatch.setattr(
        WorkerRegistry, "noted", lambda self, worker: process_exit.note_memory() | {"peak_mb": 980, "limit_mb": 1000}
    )
    with pytest.raises(registry.WorkerDiedError, match="SIGSEGV: it was not killed for lack of memory") as error:
        bench.turn(1)
    assert client.public_reason(error.value) == "WorkerError: the site's worker ended: killed or crashed"


@pytest.mark.long
def test_a_worker_s_memory_stands_beside_its_card_until_it_ends_or_is_asked_for(bench):
    bench.turn(0)
    (worker,) = bench.workers()
    file = bench.folder.path / f"{worker.id}.noted"
    assert file.stat().st_mode & 0o777 == 0o600
    assert 50 < json.loads(file.read_text())["peak_mb"] < 10_000
    os.kill(worker.pid, signal.SIGKILL)
    assert until(lambda: bench.workers() == [])  # `fedveil site status` looks too
    assert bench.folder.noted(worker.id)["pid"] == worker.pid
    assert bench.folder.noted(worker.id) == {}
    file.write_text("torn {")
    assert bench.folder.noted(worker.id) == {}
    file.write_text("{}")
    os.utime(file, (0, 0))
    assert bench.workers() == []
    assert not file.exists()


@pytest.mark.long
def test_killed_while_replying_the_turn_is_repeated_from_the_same_private_state(bench, tmp_path, monkeypatch):
    entries = 4_000_000  # 16 MB: more than the sockets on the way can hold
    whole = unbroken(tmp_path / "whole", bench.app, rounds=2, entries=entries)
    bench.orders(entries=entries)
    uploads = [bench.turn(0)]
    (worker,) = bench.workers()
    seen = []

    def killing(answers):
        for part in slice_message(answers):
            seen.append(len(part))
            if len(seen) == 1:
                os.kill(worker.pid, signal.SIGKILL)
            yield part

    monkeypatch.setattr(connection, "slice_message", killing)
    uploads.append(bench.turn(1))
    assert len({line["pid"] for line in bench.lines()}) == 2
    assert [line["round"] for line in bench.lines()] == [0, 1, 1]
    assert uploads == whole.uploads
    assert bench.private() == whole.private()


@pytest.mark.long
def test_a_stale_socket_and_a_broken_card_are_removed(bench):
    bench.folder.path.mkdir(parents=True, mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(bench.folder.socket("deadbeef")))
    left.close()
    key = registry.run_key(bench.assignment(), bench.app)
    bench.folder.write(connection.WorkerRecord("deadbeef", 1, HERE, registry.app_digest(bench.app), key, 0.0))
    (bench.folder.path / "feedbeef.json").write_text("{")
    assert bench.turn()
    assert not bench.folder.socket("deadbeef").exists()
    assert len(list(bench.folder.path.glob("*.json"))) == 1


@pytest.mark.long
def test_a_full_disk_leaves_the_last_private_state_and_the_next_turn_goes_on(bench):
    bench.orders(entries=200_000)
    bench.turn(0)
    before, (worker,) = bench.private(), bench.workers()
    received = bench.state / "first" / "north" / "received.json"
    judged_by = received.read_bytes()
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    message = r"turn-[0-9a-f]{16}.safetensors: cannot write the private state: .*; free some disk space"
    with pytest.raises(connection.ClientRoundError, match=message) as error:
        bench.turn(1)
    assert error.value.kind == "StateError"
    assert bench.private() == before
    assert list((bench.state / "first" / "north").glob("*.safetensors")) == [bench.file()]
    assert received.read_bytes() == judged_by
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bench.turn(1)
    assert bench.private() != before
    assert bench.workers() == [worker]
