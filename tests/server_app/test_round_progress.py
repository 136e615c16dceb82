"""progress.json: who was asked and has answered, at each moment of a round, and small whatever the cohort is."""

from __future__ import annotations

import json
import os
import stat

import pytest

from fedveil.server_app import round_progress
from fedveil.server_app.round_progress import RoundProgressFile


@pytest.fixture
def at(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(round_progress.time, "time", lambda: now[0])
    underway = RoundProgressFile(tmp_path)
    underway.deadline_seconds, underway.quorum = 600.0, 2

    def seen(seconds=0.0):
        now[0] += seconds
        return json.loads((tmp_path / round_progress.NAME).read_text())

    return underway, seen


def test_a_round_from_its_first_wait_to_its_end(at):
    underway, seen = at
    underway.waits(1)
    assert (seen()["phase"], seen()["round"], seen(5)["waiting"]) == ("waiting", 1, [])
    for site in ("east", "south", "west"):
        underway.asked(1, 0, ["east", "south", "west"], site, 10)
    expected = {
        "round": 1, "attempt": 0, "phase": "round", "since": 1005.0, "deadline_seconds": 600.0, "quorum": 2, "asked": 3,
        "accepted": 0, "failed": 0, "waiting": ["east", "south", "west"], "reasons": {},
    }  # fmt: skip
    assert seen(3) == expected
    underway.accepted("south", 7)
    underway.failed("west", "refused: <b>", 5)
    assert seen() == expected | {"accepted": 1, "failed": 1, "waiting": ["east"], "reasons": {"west": "refused: <b>"}}
    underway.unseen = True
    underway.done()
    assert (seen()["phase"], seen()["unseen"]) == ("done", True)
    assert underway.sizes == {
        "east": {"upload_bytes": 0, "download_bytes": 10},
        "south": {"upload_bytes": 7, "download_bytes": 10},
        "west": {"upload_bytes": 5, "download_bytes": 10},
    }


def test_another_attempt_begins_with_nobody_s_answer(at):
    underway, seen = at
    underway.asked(0, 0, ["east", "west"], "east", 10)
    underway.failed("east", "no reply", 0)
    underway.done()
    underway.asked(0, 1, ["west"], "west", 10)
    assert (seen()["attempt"], seen()["asked"], seen()["failed"], seen()["waiting"]) == (1, 1, 0, ["west"])
    assert set(underway.sizes) == {"west"}


def test_the_same_round_again_after_a_resume_begins_anew(at):
    underway, seen = at
    underway.asked(0, 0, ["east"], "east", 10)
    underway.accepted("east", 5)
    underway.done()
    underway.asked(0, 0, ["east"], "east", 10)
    assert (seen()["accepted"], seen()["waiting"]) == (0, ["east"])


def test_the_file_stays_small_and_private(at, tmp_path):
    underway, seen = at
    names = [f"site-{i:04}" + "x" * 55 for i in range(1000)]
    for site in names:
        underway.asked(0, 0, names, site, 10)
    for site in names[500:]:
        underway.failed(site, "y" * 300, 0)
    progress = seen()
    assert (progress["asked"], progress["failed"], len(progress["waiting"]), len(progress["reasons"])) == (
        1000,
        500,
        20,
        20,
    )
    file = tmp_path / round_progress.NAME
    assert file.stat().st_size < 12_000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [f.name for f in tmp_path.iterdir()] == [round_progress.NAME]


def test_a_reader_never_sees_half_a_file(at, tmp_path):
    underway, seen = at
    underway.waits(0)
    with (tmp_path / round_progress.NAME).open() as before:
        underway.asked(0, 0, ["east"], "east", 10)
        assert json.load(before)["phase"] == "waiting"
    assert seen()["phase"] == "round"


def test_a_disk_that_does_not_take_it_stops_nothing_and_is_said_once(at, tmp_path, monkeypatch):
    underway, _ = at
    log_messages = []
    monkeypatch.setattr(round_progress, "log", lambda level, text, *values: log_messages.append(text % values))
    monkeypatch.setattr(os, "open", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    underway.waits(0)
    underway.asked(0, 0, ["east"], "east", 10)
    underway.accepted("east", 3)
    assert len(log_messages) == 1
    assert "No space left" in log_messages[0]
    assert underway.sizes["east"]["upload_bytes"] == 3
