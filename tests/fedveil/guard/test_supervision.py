"""Flower's real SuperNode against a server that errs: its heartbeats and its loop go on, beside Flower's own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.console.flower.certificates import write_node_key, write_secret
from fedveil.console.flower.machine import format_toml, free_ports
from fedveil.console.flower.programs import supernode_command
from fedveil.guard import last_heartbeat
from tests.conftest import ROOT
from tests.fedveil.guard.fake_fleet import SPEAKS, FakeFleet

# With heartbeats every second: of Flower's own interval, 20 s, nothing is to be shown.
_SCRIPT = """
import sys
import flwr.supercore.heartbeat as heartbeat
heartbeat.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_CALL_TIMEOUT + 1
if {guarded}:
    from fedveil.guard.supernode import main
else:
    from flwr.supernode.cli import flower_supernode as main
    if {speaks!r} == "HTTP":
        sys.argv = [word for word in sys.argv if word != "--grpc-rere"]
main()
"""
_CUTS = 4
_ERRS = {
    "an INTERNAL answer to a heartbeat": ("SendNodeHeartbeat", ["", "INTERNAL"]),
    "a heartbeat that is answered with no success": ("SendNodeHeartbeat", ["", "no"]),
    "a heartbeat after the end of a run": ("SendNodeHeartbeat", ["", "PERMISSION_DENIED"]),
    "RESOURCE_EXHAUSTED at a look for messages": ("PullMessages", ["", "RESOURCE_EXHAUSTED"]),
    "INTERNAL at a look for messages": ("PullMessages", ["", "INTERNAL"]),
    "cut handshakes": ("", []),
}


@contextlib.contextmanager
def supernode(folder: Path, fleet: FakeFleet, guarded: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A real process with a connection to the fleet; it notes its heartbeats in `heard`."""
    (port,) = free_ports(1)
    write_node_key(folder / "node.key")
    (folder / "node.toml").write_text(format_toml({"site": "north"}))
    command = supernode_command(
        fleet.address, fleet.ca, folder / "node.key", port, folder / "node.toml", write_secret(folder / "secret")
    )
    script = _SCRIPT.format(guarded=guarded, speaks=SPEAKS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *command[1:]],
            env={**env, last_heartbeat.VARIABLE: str(folder / "heard")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


def goes_on(fleet: FakeFleet, seconds: float) -> bool:
    """Whether heartbeats and looks for messages are answered from now on."""
    before = fleet.answered.copy()
    return until(
        lambda: all(fleet.answered[call] >= before[call] + 3 for call in ("SendNodeHeartbeat", "PullMessages")), seconds
    )


def err(fleet: FakeFleet, errs: str) -> None:
    call, statuses = _ERRS[errs]
    if call:
        fleet.script[call] = list(statuses)
    else:
        fleet.cut(_CUTS)
    # Flower's own leaves its loop at the first handshake that is cut.
    assert until(lambda: not fleet.script.get(call) and (bool(call) or fleet.cuts_left < _CUTS), 60), errs


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_supernode_outlives_whatever_a_server_answers_and_notes_when_it_was_heard(tmp_path: Path) -> None:
    heard, log = tmp_path / "heard", tmp_path / "log"
    with FakeFleet(tmp_path).serving() as fleet, supernode(tmp_path, fleet, guarded=True) as process:
        assert until(lambda: fleet.answered["PullMessages"] > 0, 60), log.read_text()[-3000:]
        for errs in _ERRS:
            err(fleet, errs)
            assert goes_on(fleet, 90), f"{errs}: {log.read_text()[-3000:]}"
        assert process.poll() is None
        at = last_heartbeat.last_answer(heard)
        assert at is not None
        assert until(lambda: (last_heartbeat.last_answer(heard) or 0) > at, 30)
        fleet.script["SendNodeHeartbeat"] = ["INTERNAL"] * 1000  # it is asked, and does not answer: no sign of life
        assert until(lambda: fleet.asked["SendNodeHeartbeat"] > fleet.answered["SendNodeHeartbeat"] + 3, 60)
        at = last_heartbeat.last_answer(heard)
        time.sleep(3)
        assert last_heartbeat.last_answer(heard) == at


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("errs", _ERRS)
def test_flowers_own_supernode_goes_silent_and_lives_on(tmp_path: Path, errs: str) -> None:
    """Red where a release of Flower has mended it; then ours can go."""
    with FakeFleet(tmp_path).serving() as fleet, supernode(tmp_path, fleet, guarded=False) as process:
        assert until(lambda: fleet.answered["PullMessages"] > 0, 60), (tmp_path / "log").read_text()[-3000:]
        for _ in range(3):  # on a busy machine it may meet none of the errors the first time
            err(fleet, errs)
            if not goes_on(fleet, 15):
                break
        else:
            pytest.fail("it goes on")
        assert process.poll() is None  # so nobody would see it


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_handshake_that_fails_before_the_first_answer_ends_it(tmp_path: Path) -> None:
    """It may be another server, or the kit's certificate another one's: its people are to be told."""
    with FakeFleet(tmp_path).serving() as fleet:
        fleet.cut(100)
        with supernode(tmp_path, fleet, guarded=True) as process:
            assert until(lambda: process.poll() is not None, 90)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_server_that_does_not_take_the_key_ends_it(tmp_path: Path) -> None:
    with FakeFleet(tmp_path).serving() as fleet, supernode(tmp_path, fleet, guarded=True) as process:
        assert goes_on(fleet, 60)
        fleet.script["PullMessages"] = ["UNAUTHENTICATED"] * 1000
        assert until(lambda: process.poll() is not None, 60)
