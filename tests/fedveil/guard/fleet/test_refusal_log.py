"""Lines about refused calls: seen at once, and too few to fill a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import StateError
from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet.refusal import RefusalReason
from fedveil.guard.fleet.refusal_log import FleetRefusalLog
from fedveil.records import audit_log


class Log:
    """The log of a server, and the clock that it goes by."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 1000.0
        self.control = ControlLog(folder / "control-log.jsonl")
        self.refusals = FleetRefusalLog(self.control, monotonic=lambda: self.seconds)

    def refuse(self, times: int = 1, site: str = "east", reason: Any = RefusalReason.HASH, value: str = "x") -> None:
        for _ in range(times):
            self.refusals.record_refusal(site, 7 if site == "east" else 8, "push_object", reason, value)

    def lines(self, event: str = "fleet-refused") -> list[dict[str, Any]]:
        return [line for line in audit_log.read_log(self.control.file) if line["event"] == event]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_the_first_is_written_at_once_with_what_was_sent(log: Log) -> None:
    log.refuse(value="\x1b[2J" + "y" * 500)
    (line,) = log.lines()
    assert (line["site"], line["node"], line["call"], line["count"]) == ("east", "7", "push_object", 1)
    assert line["reason"] == "object does not match its hash"
    assert "\x1b" not in line["value"]
    assert len(line["value"]) <= 80 + len(" (504 characters)") + len(r"...\x1b")


def test_more_of_them_are_counted(log: Log) -> None:
    log.refuse(1000)
    assert [line["count"] for line in log.lines()] == [1]
    log.seconds += 61
    log.refuse()
    assert [line["count"] for line in log.lines()] == [1, 1000]
    assert "value" not in log.lines()[1]


def test_the_sweep_writes_what_is_left(log: Log) -> None:
    log.refuse(5)
    log.refusals.write_counts()
    log.seconds += 61
    log.refusals.write_counts()
    log.refusals.write_counts()
    assert [line["count"] for line in log.lines()] == [1, 4]


def test_each_site_and_reason_has_lines_of_its_own(log: Log) -> None:
    log.refuse(2)
    log.refuse(2, site="west")
    log.refuse(2, reason=RefusalReason.HEAD)
    assert len(log.lines()) == 3


def test_twenty_in_a_minute_are_a_rogue_once_a_minute(log: Log) -> None:
    log.refuse(19)
    assert log.lines("rogue") == []
    log.refuse(100)
    (line,) = log.lines("rogue")
    assert (line["site"], line["node"], line["count"]) == ("east", "7", 20)
    log.seconds += 61
    log.refuse(19)
    assert len(log.lines("rogue")) == 1
    log.refuse()
    assert len(log.lines("rogue")) == 2


def test_twenty_in_an_hour_are_none(log: Log) -> None:
    for _ in range(60):
        log.refuse()
        log.seconds += 10
    assert log.lines("rogue") == []


@pytest.mark.parametrize("reason", RefusalReason)
def test_what_the_server_itself_causes_makes_no_rogue(log: Log, reason: RefusalReason) -> None:
    of_honest_sites = {RefusalReason.ANSWERED, RefusalReason.ENDED, RefusalReason.DROPPED, RefusalReason.STORAGE}
    log.refuse(30, reason=reason)
    assert len(log.lines("rogue")) == (reason not in of_honest_sites)
    assert [line["reason"] for line in log.lines()] == [reason.value]


def test_a_log_that_cannot_be_written_changes_no_refusal(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: Any) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(log.control, "write", fails)
    log.refuse(30)
