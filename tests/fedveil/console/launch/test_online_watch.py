"""Whether a site is online, and the words for why not; which turns went wrong."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedveil.console.doctor import checks
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import online_watch
from fedveil.console.launch.online_watch import SiteStartWatcher
from fedveil.errors import ConfigError
from fedveil.guard import last_heartbeat
from fedveil.records import audit_log


@pytest.fixture(autouse=True)
def a_server(monkeypatch):
    """That answers, and is looked at in vain: what is tested is what a SuperNode's end means."""
    monkeypatch.setattr(online_watch, "_answers", lambda superlink: True)
    monkeypatch.setattr(online_watch, "_POLL_SECONDS", 0.0)


def watch(processes: ProcessGroup, began: int = 0) -> SiteStartWatcher:
    folder = processes.logs
    return SiteStartWatcher(processes, "north", folder / audit_log.NAME, "h:1", folder / "ca.crt", began, 0)


@pytest.mark.parametrize(
    "code,reason",
    [
        ("305", "Flower's exit code 305: the server does not know the key, or a site with this key is already online"),
        ("302", "Flower's exit code 302: the key is not an elliptic-curve key"),
        ("600", "Flower's exit code 600: its log ends: .*could not"),
    ],
)
def test_why_a_supernode_ended_is_said_in_words(code, reason, tmp_path):
    """Of this start alone: the log has an earlier end too."""
    earlier = "see ref-exit-codes/302.html\n" if code != "302" else "see ref-exit-codes/305.html\n"
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text(
        earlier + f"could not start\n<https://flower.ai/docs/ref-exit-codes/{code}.html>\n"
    )
    processes.ended = lambda name: 1
    with pytest.raises(ConfigError, match=reason) as error:
        watch(processes, len(earlier)).until_ended()
    assert isinstance(error.value, online_watch.StateLockedError) == (
        code == "305"
    )  # a start that may work in a minute


@pytest.mark.parametrize(
    "log",
    [
        '\tdetails = "fedveil: this key expired on 2026-03-01\x1b[2J; a"\n\tdebug = "fedveil: x"\n',
        "Failed to initialize the connection to the SuperLink.\nfedveil: this key expired on 2026-03-01\n"
        "see ref-exit-codes/305.html\n",
        "Failed to initialize the connection to the SuperLink.\n[code: 0] fedveil: this key expired on "
        "2026-03-01\nsee ref-exit-codes/305.html\n",
    ],
)
def test_the_reason_that_the_server_gives_is_shown_as_text(log, tmp_path):
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text(log)
    processes.ended = lambda name: 0
    with pytest.raises(ConfigError, match="does not serve it: fedveil: this key expired on 2026-03-01") as error:
        watch(processes).until_ended()
    assert "\x1b" not in str(error.value)
    was_online = watch(processes)
    was_online.online = True
    with pytest.raises(ConfigError, match="no longer serves it: fedveil: this key expired on"):
        was_online.until_ended()


def test_a_supernode_that_the_server_ended_is_not_taken_for_one_that_was_stopped(tmp_path):
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text("SuperNode ID: 5\nSuperNode terminated gracefully.\n")
    states = iter([None, 0])
    processes.ended = lambda name: next(states)
    with pytest.raises(ConfigError, match="the server refused this site's key.*on the next start"):
        watch(processes).until_ended()


def test_a_server_that_is_not_there_is_not_called_one_that_does_not_know_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(online_watch, "_answers", lambda superlink: False)
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text("see ref-exit-codes/305.html\n")
    processes.ended = lambda name: 1
    with pytest.raises(ConfigError, match="no answer from h:1; check that the server is up"):
        watch(processes).until_ended()


def test_a_supernode_that_was_killed_is_called_so_and_not_by_the_last_line_of_its_log(tmp_path):
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text("INFO : Received: train message abc\n")
    processes.ended = lambda name: -9
    with pytest.raises(ConfigError, match=r"killed from outside \(signal 9: Killed\)") as error:
        watch(processes).until_ended()
    assert "Received" not in str(error.value)


def test_what_is_missing_is_said_once_and_looked_for_until_the_site_is_online(tmp_path, monkeypatch, capsys):
    probe_answers = iter(["nothing answers yet: a", "nothing answers yet: a", "nothing answers yet: b", ""])
    monkeypatch.setattr(online_watch, "missing_sites", lambda superlink, ca: next(probe_answers))
    monkeypatch.setattr(online_watch, "_PROBE_SECONDS", 0.0)
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text("")
    left = iter([None] * 4 + ["online", None, 0])

    def ended(name):
        if (what := next(left)) == "online":
            processes.log("north").write_text("SuperNode ID: 5\n")
            return None
        return what

    processes.ended = ended
    with pytest.raises(ConfigError, match="the server refused this site's key"):
        watch(processes).until_ended()
    assert capsys.readouterr().out.splitlines() == [
        "site north: nothing answers yet: a", "site north: nothing answers yet: b", "site north: online",
    ]  # fmt: skip
    assert list(probe_answers) == []


@pytest.mark.parametrize(
    ("ahead", "verdict", "words"),
    [
        (7200, "fail", "this machine's clock is 7,200 s ahead of the server's"), (-7200, "fail", "7,200 s behind the"),
        (6, "fail", "up to 5 s ahead and 305 s behind"), (4, "warn", "within 4 s"), (0, "ok", "within 0 s"),
        (-300, "ok", "within 300 s"), (None, "ok", "does not report its time"),
    ],
)  # fmt: skip
def test_a_clock_that_is_off_is_said_by_doctor_and_at_the_start(ahead, verdict, words, monkeypatch, tmp_path):
    shown = None if ahead is None else datetime.now(UTC) - timedelta(seconds=ahead)
    for name in ("_grpc_clock", "_http_clock"):
        monkeypatch.setattr(checks, name, lambda *_: shown)
    result = checks.check_server_clock("h:1", tmp_path / "ca.crt")
    assert result.verdict == verdict
    assert words in result.text
    monkeypatch.setattr(checks, "check_fleet_port", lambda *_: checks.CheckResult("fleet port", "ok", ""))
    told = online_watch.missing_sites("h:1", tmp_path / "ca.crt")
    assert (words in told, "keeps retrying" in told) == ((verdict == "fail"), (verdict == "fail"))


def test_a_turn_that_went_wrong_is_on_the_screen_with_its_cause_and_once(tmp_path, capsys):
    """As text, and of this start alone; and that something was sent, or the screen is silent while all goes well."""
    file: Path = tmp_path / audit_log.NAME
    about = {"run": "pilot-0a1b2c3d", "round": 1}
    audit_log.append_entry(file, "failed", {**about, "reason": "earlier"})
    watched = SiteStartWatcher.from_processes(ProcessGroup(tmp_path), "north", tmp_path, "h:1", tmp_path / "ca.crt")
    audit_log.append_entry(file, "admitted", about)
    audit_log.append_entry(file, "sent", about | {"up_bytes": 1496})
    audit_log.append_entry(
        file, "failed", {**about, "reason": "KeyError at the site", "cause": "KeyError: no column \x1b[2J"}
    )
    audit_log.append_entry(file, "refused", {"reason": "PolicyError: no"})
    watched.tell()
    watched.tell()
    assert capsys.readouterr().out.splitlines() == [
        "site north: round 2 of pilot-0a1b2c3d: sent 1496 bytes",
        "site north: round 2 of pilot-0a1b2c3d failed: KeyError: no column \\x1b[2J",
        "site north: a run was refused: PolicyError: no",
    ]
    with file.open("a") as log:
        log.write("{half\n")
    watched.tell()
    watched.tell()
    assert capsys.readouterr().out.count("fedveil log verify") == 1


_FAILED = "\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 2.41 seconds\n"
_BACK = "\x1b[92mINFO \x1b[0m:      Connection successful after 12.30 seconds and 5 tries.\n"


def test_a_server_that_is_away_is_said_once_and_that_it_is_back(tmp_path, monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(online_watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(online_watch.time, "strftime", lambda form: "12:03:04")
    processes = ProcessGroup(tmp_path)
    log = processes.log("north")

    def after(seconds: float, *lines: str) -> list[str]:
        clock[0] += seconds
        with log.open("a") as file:
            file.write("".join(lines))
        watched.listen()
        return capsys.readouterr().out.splitlines()

    log.write_text(_FAILED)  # of an earlier start
    watched = SiteStartWatcher.from_processes(processes, "north", tmp_path, "h:1", tmp_path / "ca.crt")
    watched.online = True
    assert after(60, "SuperNode ID: 5\n", _FAILED[:20]) == []
    assert after(1, _FAILED[20:]) == []
    assert after(5, _FAILED, _BACK) == []  # too short to be worth a word
    assert after(60, _FAILED) == []
    assert after(10, _FAILED) == [
        "site north: no answer from the server at h:1 since 12:03:04; the site keeps retrying and resumes on its own "
        "once the server answers"
    ]
    assert after(30, _FAILED) == []
    assert after(20, _BACK) == ["site north: the server answers again, after 60 s"]
    assert after(30, _FAILED, _BACK) == []
    log.write_text(
        "x" * (online_watch._MOST_HEARD + 5)
    )  # cut short, then a line without an end, as an app may print one
    assert after(1) == []
    assert after(60, "\n", _FAILED) == []
    assert len(after(10)) == 1
    log.unlink()
    watched.listen()
    assert capsys.readouterr().out == ""


def test_online_is_said_while_heartbeats_are_answered_alone(tmp_path, monkeypatch, capsys):
    """A SuperNode whose heartbeats fail logs nothing and lives on."""
    now = [time.time()]
    monkeypatch.setattr(online_watch.time, "time", lambda: now[0])
    monkeypatch.setattr(last_heartbeat.time, "time", lambda: now[0])
    watched, heard = watch(ProcessGroup(tmp_path)), tmp_path / "north.heartbeat"
    heard.touch()
    os.utime(heard, (now[0] - 5000, now[0] - 5000))

    def after(seconds: float, answered: bool) -> str:
        now[0] += seconds
        if answered:
            os.utime(heard, (now[0], now[0]))
        watched.tell_silence()
        return capsys.readouterr().out

    assert after(100, False) == ""  # not taken by the server yet
    watched.online, watched.since = True, now[0]
    assert after(20, False) == ""  # what is old is of an earlier start
    assert after(20, True) == ""
    assert after(70, False) == ""
    assert re.fullmatch(r"site north: not heard by the server since \S+; this site keeps retrying\n", after(10, False))
    assert after(60, False) == ""
    assert after(20, True) == "site north: the server hears this site again\n"
    watched.away_said = True
    assert after(200, False) == ""  # said already


@pytest.mark.parametrize(
    "code,log,mends",
    [
        (1, "ValueError: database is locked\n", True),
        (-9, "", True),
        (0, "SuperNode ID: 5\n", True),
        (1, "error: flwr: expected version 1.39\n", False),
        (1, "fedveil: this key expired on 2026-01-01\n", False),
        (1, "https://flower.ai/docs/framework/ref-exit-codes/302.html\n", False),
        (1, "https://flower.ai/docs/framework/ref-exit-codes/600.html\n", True),
    ],
)
def test_which_ends_a_new_start_may_mend(code, log, mends, tmp_path):
    processes = ProcessGroup(tmp_path)
    processes.log("north").write_text(log)
    watched = watch(processes)
    watched.online = True
    assert isinstance(watched.ended(code), online_watch.SiteProcessEndedError) == mends


def test_another_process_of_the_site_that_ended_is_started_again_alone(tmp_path):
    processes, ends = ProcessGroup(tmp_path), []
    states, parts = iter([None, 9, None, 1]), iter(["north superexec", "north"])
    processes.ended, processes.ended_part = lambda name: next(states), lambda name: next(parts)
    processes.log("north").write_text("")
    with pytest.raises(online_watch.SiteProcessEndedError, match="exit code 1"):
        watch(processes).until_ended(part_ended=ends.append)
    assert ends == [9]
