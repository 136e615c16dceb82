"""`fedveil log show`: for people in words, for programs as it is."""

from __future__ import annotations

import json
import time

import pytest

from fedveil.console.main import main
from fedveil.records import audit_log

HASH = "3c225457a7bd" + "0" * 52


@pytest.fixture
def log(tmp_path):
    about = {"run": "pilot-0a1b2c3d", "round": 1, "site": "north", "app": HASH, "down_bytes": 1234567, "signer": ""}
    audit_log.append_entry(tmp_path / audit_log.NAME, "sent", {**about, "up_bytes": 271828, "fields": ["a", "b", "c"]})
    audit_log.append_entry(
        tmp_path / audit_log.NAME, "failed", {**about, "cause": "KeyError: \x1b[2J no", "reason": "short"}
    )
    return tmp_path / audit_log.NAME


def test_people_read_rounds_from_one_sizes_short_hashes_and_the_reason_last(log, capsys, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert main(["log", "show", str(log)]) == 0
    sent, failed = capsys.readouterr().out.splitlines()
    when = audit_log.read_log(log)[0]["time"]
    assert sent.split()[:3] == ["0", when[:10], when[11:19]]
    for words in (
        "pilot-0a1b2c3d  round 2  north",
        "down 1,234,567 B  up 271,828 B",
        "app=3c225457a7bd...",
        "fields=3",
    ):
        assert words in sent
    assert HASH not in sent
    assert "signer" not in sent
    assert failed.endswith(": KeyError: \\x1b[2J no; short")


def test_programs_get_every_key_of_every_line(log, capsys):
    assert main(["log", "show", "--json", str(log)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == audit_log.read_log(log)


def test_a_time_or_round_that_is_none_is_shown_as_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(audit_log, "read_log", lambda file: [{"n": "x", "time": "y\x1b", "event": "z", "round": [1]}])
    assert main(["log", "show", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["x", "y\\x1b", "z", "[1]"]


def masked(folder, site: str, plan: str, attempt: int = 0):
    """Return a site's log with a line for which it masked, and one of the sum that it opened."""
    file = folder / site / audit_log.NAME
    about = {"run": "pilot-0a1b2c3d", "round": 1, "attempt": attempt, "site": site, "plan": plan}
    audit_log.append_entry(file, "masked", about)
    audit_log.append_entry(file, "opened", {**about, "list": "ab" * 32, "signatures": {"north": "cd" * 64}})
    return file


def test_two_logs_of_one_plan_are_found_equal(tmp_path, capsys):
    logs = [str(masked(tmp_path, site, HASH)) for site in ("north", "south")]
    assert main(["log", "compare", *logs]) == 0
    assert capsys.readouterr().out == (
        "1 secure-aggregation attempts are in both logs: each has one plan, and one list of sites in its sum\n"
    )


def test_two_logs_of_two_plans_are_found_to_contradict_each_other(tmp_path, capsys):
    logs = [str(masked(tmp_path, site, plan)) for site, plan in (("north", HASH), ("south", "e" * 64))]
    assert main(["log", "compare", *logs]) == 1
    assert f"round 2, attempt 1: the sites masked for 2 plans: plan {HASH} at north" in capsys.readouterr().out


def test_logs_without_a_common_attempt_are_not_called_equal(tmp_path, capsys):
    logs = [str(masked(tmp_path, site, HASH, attempt)) for attempt, site in enumerate(("north", "south"))]
    assert main(["log", "compare", *logs]) == 2
    assert "expected secure-aggregation rounds that both sites took part in" in capsys.readouterr().err


def test_a_changed_log_is_not_compared(tmp_path, capsys):
    first, second = (masked(tmp_path, site, HASH) for site in ("north", "south"))
    second.write_bytes(second.read_bytes().replace(b'"round":1', b'"round":2'))
    assert main(["log", "compare", str(first), str(second)]) == 2
    assert "line 1: expected a whole line with its own hash" in capsys.readouterr().err


def test_people_read_how_many_signatures_a_list_has(tmp_path, capsys):
    assert main(["log", "show", str(masked(tmp_path, "north", HASH))]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("signatures=1")
