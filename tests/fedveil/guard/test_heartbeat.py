"""Heartbeats after any error, beside Flower's own sender, whose thread ends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from flwr.supercore import heartbeat as flowers
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender
from flwr.supercore.run import RunNotRunningException

from fedveil.guard import heartbeat, last_heartbeat
from fedveil.guard.heartbeat import NodeHeartbeatSender, PersistentHeartbeatSender, TaskHeartbeatSender
from fedveil.records import process_exit


class Server:
    """Fails with each error once, then answers well."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.well = list(errors), threading.Event()

    def __call__(self) -> bool:
        if self.errors:
            raise self.errors.pop(0)
        self.well.set()
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invoker that waits for a moment; the threads that end with an error say so nowhere."""
    monkeypatch.setattr(flowers, "exponential", lambda **_: iter([0.01] * 100))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


@pytest.mark.long
@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("Heartbeat failed"), RunNotRunningException()])
def test_a_heartbeat_goes_on_after_any_error_and_flowers_ends(error: BaseException) -> None:
    for sender, goes_on in ((PersistentHeartbeatSender, True), (HeartbeatSender, False)):
        server = Server(error)
        sent = sender(server)
        sent.start()
        assert server.well.wait(10 if goes_on else 1) == goes_on
        assert sent.is_running == goes_on
        if goes_on:
            sent.stop()
            assert not sent.is_running
        else:
            with pytest.raises(RuntimeError):
                sent.stop()


def test_one_whose_thread_has_ended_can_be_stopped() -> None:
    PersistentHeartbeatSender(Server()).stop()


def test_an_error_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.guard import minute_log

    lines: list[str] = []
    now = [0.0]
    monkeypatch.setattr(minute_log, "log", lambda _level, form, words: lines.append(form % words))
    monkeypatch.setattr(heartbeat, "_log", minute_log.MinuteLog(lambda: now[0]))
    sender = PersistentHeartbeatSender(Server(*(ValueError(f"text {n} of the server\n") for n in range(5))))
    for at in (0.0, 10.0, 59.0, 61.0, 62.0):
        now[0] = at
        with pytest.raises(HeartbeatFailure):
            sender._heartbeat()
    assert [line.rpartition("ValueError: ")[2][:6] for line in lines] == ["text 0", "text 3"]


def test_what_is_answered_is_noted_and_what_is_not_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = last_heartbeat.heartbeat_file(tmp_path, "north")
    monkeypatch.setenv(last_heartbeat.VARIABLE, str(file))
    sender = NodeHeartbeatSender(Server(ValueError()))
    with pytest.raises(HeartbeatFailure):
        sender._heartbeat()
    assert last_heartbeat.last_answer(file) is None
    sender._heartbeat()
    assert last_heartbeat.describe_silence(file) == ""
    assert file.stat().st_mode & 0o777 == 0o600
    os.utime(file, (time.time() - 80, time.time() - 80))
    assert last_heartbeat.describe_silence(file).startswith("not heard by the server since ")
    sender._heartbeat()
    assert last_heartbeat.describe_silence(file) == ""


def test_a_file_that_cannot_be_written_stops_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(last_heartbeat.VARIABLE, str(tmp_path / "gone" / "north.heartbeat"))
    NodeHeartbeatSender(Server())._heartbeat()


def test_without_the_variable_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(last_heartbeat.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    NodeHeartbeatSender(Server())._heartbeat()
    assert list(tmp_path.iterdir()) == []


def test_a_silence_of_days_has_its_day() -> None:
    file = Path(__file__)
    assert "-" in last_heartbeat.describe_silence(file, file.stat().st_mtime + 200_000).rpartition("since ")[2]


def test_a_task_that_was_frozen_says_so_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower ends the run of a process that slept for a minute; that is no person's stop."""
    monkeypatch.delenv(process_exit.LAST_ANSWER, raising=False)
    assert process_exit.describe_lost_contact() == ""
    TaskHeartbeatSender(Server())._heartbeat()
    now = process_exit.boot_seconds()
    assert process_exit.describe_lost_contact(now + 59) == ""
    assert "no answer from the SuperLink for 3,600 s" in process_exit.describe_lost_contact(now + 3600)
    with pytest.raises(HeartbeatFailure):
        TaskHeartbeatSender(Server(ValueError("401")))._heartbeat()  # a refused one is no answer
    assert "3,600 s" in process_exit.describe_lost_contact(now + 3600)
    monkeypatch.setenv(process_exit.LAST_ANSWER, "yesterday")
    assert process_exit.describe_lost_contact() == ""
