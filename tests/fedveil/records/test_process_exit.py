"""What ended a process that could not say it.

Reasons of many sites, for people.
"""

from __future__ import annotations

import json
import shutil

import pytest

from fedveil.records import process_exit
from fedveil.records.process_exit import group_by_reason


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A memory cgroup with a limit of 500 MB."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "memory.max").write_text("500000000\n")
    (tmp_path / "group" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    monkeypatch.setattr(process_exit, "_group", lambda: tmp_path / "group")
    return tmp_path / "group"


def test_a_process_notes_its_memory_and_its_bound(group):
    noted = process_exit.note_memory()
    assert noted["limit_mb"] == 500
    assert noted["oom_kills"] == 3
    assert 10 < noted["memory_mb"] <= noted["peak_mb"] < 100_000


@pytest.mark.parametrize(
    "change,words",
    [
        (
            {"kills": 4},
            "killed by the kernel because memory ran out: 120 of 500 MB at its last report; give",
        ),
        (
            {"peak_mb": 430},
            "killed, probably because memory ran out: 430 of 500 MB at its last report; give",
        ),
        ({}, "killed, or it crashed, or its disk was full; its memory was 120 of 500 MB"),
        ({"boot": "another"}, "the machine was restarted, or this is another one"),
        ({"host": "another", "kills": 4}, "killed, or it crashed"),
    ],
)
def test_what_ended_it_is_found_out(change, words, group):
    kills = change.pop("kills", 3)
    noted = process_exit.note_memory() | {"peak_mb": 120} | change
    (group / "memory.events").write_text(f"oom_kill {kills}\n")
    assert process_exit.describe_ending(json.loads(json.dumps(noted))).startswith(words)


def test_nothing_noted_is_no_error():
    assert (
        process_exit.describe_ending({}) == "killed, or it crashed, or its disk was full; its memory was not recorded"
    )
    assert process_exit.exit_cause({}) is process_exit.ExitCause.OTHER


def test_a_copy_of_a_folder_says_nothing_of_the_process(tmp_path):
    import os

    (tmp_path / "run").mkdir()
    descriptor = process_exit.lock_folder(tmp_path / "run")
    assert not process_exit.is_dead(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not process_exit.is_dead(tmp_path / "copy")
    os.close(descriptor)
    assert process_exit.is_dead(tmp_path / "run")
    assert not process_exit.is_dead(tmp_path / "copy")
    assert not process_exit.is_dead(tmp_path / "none")


def test_sites_with_one_reason_stand_before_it_in_their_order():
    assert group_by_reason({"east": "a", "north": "b", "west": "a"}) == ["east, west: a", "north: b"]
    assert group_by_reason({}) == []


def test_of_many_sites_and_many_reasons_the_rest_is_counted():
    assert group_by_reason({f"s{i}": "same" for i in range(4)}, most=2) == ["s0, s1, and 2 more: same"]
    assert group_by_reason({"a": "1", "b": "2", "c": "3", "d": "3"}, most=2) == ["a: 1", "b: 2", "and 2 more"]


@pytest.mark.parametrize(
    "status,helps",
    [
        ({"state": "died", "process": {"oom_kills": 0, "boot": "another boot"}}, True),
        ({"state": "died"}, True),
        ({"state": "failed", "reason": f"{process_exit.LOST_CONTACT}no answer"}, True),
        ({"state": "failed", "reason": "round 3: too few sites"}, False),
        ({"state": "failed", "reason": None}, False),
        ({"state": "stopped", "reason": f"{process_exit.LOST_CONTACT}no answer"}, False),
        ({"state": "completed"}, False),
        ({}, False),
    ],
)
def test_a_resume_may_help_after_an_interruption_alone(status, helps):
    assert process_exit.is_interruption(status) is helps


def test_no_resume_where_memory_ran_out(monkeypatch):
    monkeypatch.setattr(process_exit, "exit_cause", lambda about: process_exit.ExitCause.MEMORY)
    assert not process_exit.is_interruption({"state": "died"})
