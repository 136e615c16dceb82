"""`fedveil server purge`: what goes, what stays, and what it never touches."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from fedveil.console.backup import server_purge
from fedveil.console.main import main
from fedveil.errors import StateError
from fedveil.records import audit_log, process_exit
from fedveil.records.atomic_files import link_atomic

DAY = 86_400
GOES = ("checkpoint.safetensors", "checkpoint-before.safetensors", "checkpoint-damaged.safetensors",
        "best-00003.safetensors", "tap/index.jsonl", "tap/00000.0.north.up", ".x.safetensors.1.part")  # fmt: skip
STAYS = ("id", "status.json", "config.json", "metrics.jsonl", "disclosure.jsonl", "resumes.jsonl", "flower-run",
         "final/server.safetensors", "final/README.md", "final/card.json", "lock", "tensorboard/events.0",
         "best-of-all.txt")  # fmt: skip
REPLY = "7/01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def pilot(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


def lay(pilot: Path, name: str, days: float, state: str = "completed") -> Path:
    folder = pilot / "runs" / name
    for file in (*GOES, *STAYS):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"x" * 100)
    (folder / "status.json").write_text(f'{{"state": "{state}"}}')
    age(folder, days)
    return folder


def age(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def files_of(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


def purge(pilot: Path, *arguments: str) -> int:
    return main(["server", "purge", str(pilot), *arguments])


def test_it_removes_what_it_lists_and_nothing_else(pilot, capsys):
    old, young = lay(pilot, "old", 40), lay(pilot, "young", 20)
    (pilot / "server" / "control-log.jsonl").write_text("x")
    reply, new_reply = pilot / "server" / "spool" / REPLY, pilot / "server" / "spool" / REPLY.replace("7/", "8/")
    for folder, days in ((reply, 40), (new_reply, 20)):
        folder.mkdir(parents=True)
        (folder / "object").write_bytes(b"abc")
        age(folder, days)
    others = {path: path.read_bytes() for name in ("registry", "server", "ca", "kits")
              for path in (pilot / name).rglob("*") if path.is_file() and reply not in path.parents}  # fmt: skip
    assert purge(pilot, "--older-than", "30", "--dry-run") == 0
    assert (listed := capsys.readouterr().out).startswith(
        "remove old: 700 bytes in 7 files, last changed 40.0 days ago\n"
    )
    assert f"{reply}, 3 bytes, objects of a reply that never became complete" in listed
    assert "nothing was removed" in listed
    assert files_of(old) == {*GOES, *STAYS}
    assert not (pilot / "runs" / audit_log.NAME).exists()
    assert purge(pilot, "--older-than", "30", "--yes") == 0
    assert "removed files of 1 runs and 1 replies, 703 bytes" in (stdout := capsys.readouterr().out)
    assert "young" not in stdout
    assert files_of(old) == set(STAYS)
    assert not (old / "tap").exists()
    assert files_of(young) == {*GOES, *STAYS}
    assert not reply.exists()
    assert new_reply.exists()
    assert {path: path.read_bytes() for path in others} == others
    line, of_reply = audit_log.read_log(pilot / "runs" / audit_log.NAME)
    assert (of_reply["event"], of_reply["reply"], of_reply["bytes"]) == ("purged", REPLY, 3)
    assert (line["event"], line["run"], line["files"], line["bytes"]) == ("purged", "old", 7, 700)
    age(old, 40)
    assert purge(pilot, "--older-than", "30", "--yes") == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_it_asks_and_refuses_wrong_options(pilot, capsys, monkeypatch):
    old = lay(pilot, "old", 40)
    for answer in ("", "n", "maybe"):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert purge(pilot, "--run", "old") == 1
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert purge(pilot, "--run", "old") == 1
    assert purge(pilot) == 2
    assert purge(pilot, "--older-than", "nan", "--yes") == 2
    assert purge(pilot, "--older-than", "-1", "--yes") == 2
    assert purge(pilot, "--run", "../server", "--yes") == 2
    assert files_of(old) == {*GOES, *STAYS}
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert purge(pilot, "--run", "old") == 0
    assert files_of(old) == set(STAYS)


def test_a_running_run_stays_and_one_that_has_not_ended_is_named(pilot, capsys, monkeypatch):
    running, failed = lay(pilot, "running", 40), lay(pilot, "failed", 40, "failed")
    lock = process_exit.lock_folder(running)
    assert purge(pilot, "--older-than", "0", "--run", "running", "--run", "failed", "--yes") == 0
    stdout = capsys.readouterr().out
    assert "keep   running: 700 bytes in 7 files" in stdout
    assert ": it is running" in stdout
    assert (
        "remove failed: 700 bytes in 7 files, last changed 40.0 days ago, has not completed: it cannot be res" in stdout
    )
    assert files_of(running) == {*GOES, *STAYS}
    assert files_of(failed) == set(STAYS)
    os.close(lock)
    (run,) = (run for run in server_purge.list_purgeable_runs(pilot / "runs") if run.folder == running)
    monkeypatch.setattr(server_purge, "list_purgeable_runs", lambda runs: [run])
    lock = process_exit.lock_folder(running)  # it begins between the list and the removal
    assert purge(pilot, "--run", "running", "--yes") == 0
    assert "keep   running: 700 bytes in 7 files, last changed" in (stdout := capsys.readouterr().out)
    assert "it began to run in the meantime" in stdout
    assert files_of(running) == {*GOES, *STAYS}
    os.close(lock)


def test_no_link_is_followed(pilot, tmp_path, capsys):
    outside = tmp_path / "outside"
    (outside / "tap").mkdir(parents=True)
    for name in ("id", "checkpoint.safetensors", "tap/00000.0.north.up"):
        (outside / name).write_text(name)
    linked = lay(pilot, "linked", 40)
    (linked / "tap" / "link").symlink_to(outside)
    (pilot / "runs" / "whole").symlink_to(outside)
    (pilot / "server" / "spool" / "7").mkdir(parents=True)
    (pilot / "server" / "spool" / REPLY).symlink_to(outside)
    other = pilot / "server" / "spool" / REPLY.replace("7/", "8/")
    other.mkdir(parents=True)
    (other / "object").symlink_to(outside / "id")
    age(other, 40)
    age(outside, 40)
    age(pilot / "server" / "spool" / "7", 40)
    fresh = pilot / "server" / "spool" / REPLY.replace("7/", "9/")
    fresh.mkdir(parents=True)  # a site may still be sending it
    assert purge(pilot, "--older-than", "0", "--yes") == 0
    stdout = capsys.readouterr().out
    assert "keep   linked" in stdout
    assert "found a link, which is not followed" in stdout
    assert f"keep   {other}" in stdout
    assert "nothing to remove" in stdout
    assert purge(pilot, "--run", "whole", "--yes") == 2
    assert files_of(outside) == {"id", "checkpoint.safetensors", "tap/00000.0.north.up"}
    assert other.exists()
    assert fresh.exists()
    assert files_of(linked) == {*GOES, *STAYS}


def test_a_file_with_two_names_counts_once(pilot, capsys):
    folder = lay(pilot, "old", 40)
    link_atomic(folder / "checkpoint.safetensors", folder / "best-00003.safetensors")
    assert purge(pilot, "--run", "old", "--yes") == 0
    assert "600 bytes in 7 files" in capsys.readouterr().out
    assert files_of(folder) == set(STAYS)


def test_what_cannot_be_recorded_is_not_removed(pilot, capsys):
    folder = lay(pilot, "old", 40)
    (pilot / "runs" / audit_log.NAME).write_text("torn")
    assert purge(pilot, "--run", "old", "--yes") == 2
    assert "log rotate" in capsys.readouterr().err
    assert files_of(folder) == {*GOES, *STAYS}


@pytest.mark.parametrize("change", ["grows", "is gone", "is gone half way"])
def test_a_reply_that_changes_in_the_meantime_is_not_removed_as_it_was_listed(pilot, capsys, monkeypatch, change):
    reply = pilot / "server" / "spool" / REPLY
    reply.mkdir(parents=True)
    (reply / "object").write_bytes(b"abc")
    age(reply, 40)

    def answer(prompt: str) -> str:
        if change == "grows":
            (reply / "new").write_bytes(b"d")
        elif change == "is gone":
            shutil.rmtree(reply)
        return "y"

    if change == "is gone half way":

        def remove(folder: Path, *, rmtree=shutil.rmtree) -> None:
            rmtree(folder)
            raise FileNotFoundError(folder)

        monkeypatch.setattr(server_purge.shutil, "rmtree", remove)
    monkeypatch.setattr("builtins.input", answer)
    assert purge(pilot, "--older-than", "30") == 0
    stdout = capsys.readouterr().out
    if change == "is gone half way":
        assert "0 runs and 1 replies, 3 bytes" in stdout
    else:
        assert f"keep   {reply}: it changed or was removed in the meantime" in stdout
        assert not (pilot / "runs" / audit_log.NAME).exists()
    assert reply.exists() == (change == "grows")


def test_a_run_without_a_lock_file_cannot_begin_meanwhile(pilot, monkeypatch):
    """As after `fedveil server restore`, which restores no lock."""
    folder = lay(pilot, "old", 40)
    (folder / "lock").unlink()
    assert purge(pilot, "--run", "old", "--dry-run") == 0
    assert not (folder / "lock").exists()
    recording = audit_log.append_entry

    def begin(*arguments) -> None:
        monkeypatch.setattr(process_exit, "_TRIES", 1)
        with pytest.raises(StateError, match="another ServerApp uses it"):
            process_exit.lock_folder(folder)
        recording(*arguments)

    monkeypatch.setattr(server_purge.audit_log, "append_entry", begin)
    assert purge(pilot, "--run", "old", "--yes") == 0
    assert files_of(folder) == set(STAYS)
