import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fedveil.console.flower.processes import LaunchError, ProcessGroup

# A process that starts a grandchild in a session of its own, and ends itself when told "orphan".
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(0 if sys.argv[1] == "orphan" else 60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def processes(tmp_path):
    started = ProcessGroup(tmp_path)
    yield started
    started.stop(grace=0)


def _start(processes, name, kind):
    processes.start(name, [sys.executable, "-c", PARENT, kind, STUBBORN], dict(os.environ))
    deadline = time.monotonic() + 20
    while "up" not in (log := processes.log(name).read_text()) or not any(word.isdigit() for word in log.split()):
        assert time.monotonic() < deadline, log
        time.sleep(0.05)
    return int(next(word for word in log.split() if word.isdigit()))


@pytest.mark.parametrize("kind", ["parent", "orphan"])
def test_stop_ends_grandchildren_in_other_sessions(processes, kind):
    grandchild = _start(processes, "one", kind)
    assert grandchild in [p.pid for p in processes.alive()]
    processes.stop(grace=0.3)
    assert processes.alive() == []
    assert not psutil.pid_exists(grandchild)


def test_whether_a_program_runs_is_looked_for_among_all_processes_until_it_is_found(processes, monkeypatch):
    """Who waits for a ServerApp's end asks twice a second, and to look at all processes takes a tenth of one."""
    looked, marked = [], processes._marked
    monkeypatch.setattr(processes, "_marked", lambda name=None: looked.append(name) or marked(name))
    assert not processes.runs("sleep", "one")
    processes.start("one", ["sleep", "60"], dict(os.environ))
    deadline = time.monotonic() + 20
    while not processes.runs("sleep", "one"):
        assert time.monotonic() < deadline
    before = len(looked)
    assert processes.runs("sleep", "one")
    assert len(looked) == before
    assert not processes.runs("sh", "one")
    processes.kill("one")
    assert not processes.runs("sleep", "one")
    processes.start("one", ["sleep", "60"], dict(os.environ))
    while not processes.runs("sleep", "one"):
        assert time.monotonic() < deadline


def test_a_large_log_is_moved_while_its_process_writes_on(processes, monkeypatch):
    monkeypatch.setattr("fedveil.console.flower.processes._LARGEST_LOG", 100)
    code = "import time\nfor i in range(300): print(f'line {i}', flush=True); time.sleep(0.002)"
    processes.start("one", [sys.executable, "-c", code], dict(os.environ))
    log, deadline = processes.log("one"), time.monotonic() + 60
    assert not processes.trim_log("none")
    while not processes.trim_log("one"):
        assert time.monotonic() < deadline
    monkeypatch.setattr("fedveil.console.flower.processes._LARGEST_LOG", 1 << 20)
    while processes.ended("one") is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not processes.trim_log("one")
    moved, kept = log.with_name("one.log.1").read_text().splitlines(), log.read_text().splitlines()
    assert moved == [f"line {i}" for i in range(len(moved))]
    assert f"earlier lines: {log}.1" in kept
    later = [line for line in kept if line.startswith("line ")]
    assert later == [f"line {i}" for i in range(300 - len(later), 300)]  # the process appends: there is no hole
    assert len(moved) + len(later) <= 300


def test_kill_takes_one_and_leaves_the_other(processes):
    first, second = _start(processes, "one", "orphan"), _start(processes, "two", "parent")
    processes.kill("one")
    assert not psutil.pid_exists(first)
    assert psutil.pid_exists(second)
    assert processes.ended("one") is not None
    assert processes.ended("two") is None


def test_call_returns_stdout_and_raises_with_the_last_lines(processes):
    env = dict(os.environ)
    assert processes.call("x", [sys.executable, "-c", "print('hello')"], env) == "hello\n"
    with pytest.raises(LaunchError, match="no such thing"):
        processes.call("x", [sys.executable, "-c", "raise SystemExit('no such thing')"], env)
    with pytest.raises(LaunchError, match="no answer within"):
        processes.call("x", [sys.executable, "-c", "import time; time.sleep(60)"], env, timeout=0.3)
    with pytest.raises(LaunchError, match="command not found"):
        processes.call("x", ["no-such-program"], env)


def test_interrupt_stops_what_was_started(tmp_path):
    code = f"""
import os, sys, time
from pathlib import Path
from fedveil.console.flower.processes import ProcessGroup
started = ProcessGroup(Path({str(tmp_path)!r}))
try:
    started.start("one", [sys.executable, "-c", {PARENT!r}, "parent", {STUBBORN!r}], dict(os.environ))
    print("ready", flush=True)
    time.sleep(60)
finally:
    started.stop(grace=0.3)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    log, deadline = tmp_path / "one.log", time.monotonic() + 20
    while "up" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    child.wait(timeout=20)
    child.stdout.close()
    grandchild = int(next(word for word in log.read_text().split() if word.isdigit()))
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_the_part_that_has_ended_is_named(processes):
    processes.start("one", [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    assert processes.ended_part("one") == ""
    processes.start("superexec", [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), of="one")
    assert processes._children["one superexec"].wait(20) == 3
    assert (processes.ended("one"), processes.ended_part("one")) == (3, "one superexec")


def test_a_stranger_with_the_number_of_one_that_has_ended_is_left_alone(processes):
    """The system gives a process number again after some ten thousand others."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        processes.start("one", [sys.executable, "-c", ""], dict(os.environ))
        ended = processes._children["one"]
        assert ended.wait(20) == 0
        ended.pid = stranger.pid
        assert processes.alive("one") == processes.alive() == []
        processes.stop(grace=0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
