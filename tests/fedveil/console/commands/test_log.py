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
