"""`fedveil site purge` and `status`: what goes, what stays, and what a server can still ask for afterwards."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from fedveil.client_app import app as client
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.console.main import main
from fedveil.console.runs import retained_state as module
from fedveil.console.runs.retained_state import list_leftovers, list_retained, purge_state
from fedveil.console.runs.workers import WorkerStatus
from fedveil.records import audit_log
from tests.client_app.state.test_replay_guard import ask  # noqa: F401  # a fixture

DAY = 86_400


def lay(state: Path, run: str, days: float, rounds: tuple[int, int] | None = (0, 5), site="north") -> Path:
    """A run's folder that was last touched so long ago; `rounds`: the last one served, and of how many."""
    folder = state / run / site
    (folder / "tap").mkdir(parents=True)
    if rounds:
        ReplayGuard(folder).count(rounds[0], rounds[1], 3)
    for name in (f"turn-{0:016x}.safetensors", "secret", "tap/00000.0.north.up", ".turn-1.safetensors.7.part"):
        (folder / name).write_bytes(b"x" * 100)
    age(folder, days)
    return folder


def age(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in folder.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)


def around(state: Path) -> dict[Path, bytes]:
    """What lies beside the runs, and must stay."""
    names = (
        ".ledger/ledger.json",
        "workers/north/worker.log",
        "workers/north/secret",
        "north.toml",
    )
    for name in (
        *names,
        "logs/north/secret",
        "flower/x/secret",
        "data/rows/train.jsonl",
        "data/rows/.fedveil-data-set",
    ):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(name)
    return contents(state)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def site_purge(state: Path, *arguments: str) -> int:
    return main(["site", "purge", "--state-dir", str(state), *arguments])


def test_it_removes_what_it_lists_and_nothing_else(tmp_path, capsys):
    beside = around(tmp_path)
    old, young = lay(tmp_path, "old-1", 40), lay(tmp_path, "young-1", 20)
    before = contents(young)
    for name, days in (("old", 40), ("young", 20)):
        rows = tmp_path / ".prepared" / "ward" / name
        rows.mkdir(parents=True)
        (rows / "tokens").write_bytes(b"abc")
        os.utime(rows, (time.time() - days * DAY,) * 2)
    assert site_purge(tmp_path, "--older-than", "30", "--yes") == 0
    stdout = capsys.readouterr().out
    assert "goes  old-1, site north: 400 bytes, last round 40.0 days ago" in stdout
    assert "removed 1 runs, 400 bytes, and 0 leftover files; ledger and logs stay" in stdout
    assert "goes  prepared examples of ward, 3 bytes" in stdout
    assert not (tmp_path / ".prepared" / "ward" / "old").exists()
    assert (tmp_path / ".prepared" / "ward" / "young").exists()
    assert "data" not in stdout
    assert {path.name for path in old.rglob("*")} == {"served.json", "served.lock", "turn.lock"}
    assert ReplayGuard(old).purged
    assert {path: data for path, data in contents(young).items() if path.name != "turn.lock"} == before
    assert {path: path.read_bytes() for path in beside} == beside
    rows, line = audit_log.read_log(tmp_path / audit_log.NAME)
    assert (rows["event"], rows["file"], rows["bytes"]) == ("purged", ".prepared/ward/old", 3)
    assert (line["event"], line["run"], line["site"], line["bytes"]) == ("purged", "old-1", "north", 400)


def test_it_asks_and_takes_anything_but_yes_for_a_no(tmp_path, capsys, monkeypatch):
    folder = lay(tmp_path, "old-1", 40)
    before = contents(folder)
    for answer in ("", "n", "maybe"):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert site_purge(tmp_path, "--older-than", "30") == 1
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert site_purge(tmp_path, "--older-than", "30") == 1
    assert {path: data for path, data in contents(folder).items() if path.name != "turn.lock"} == before
    assert not (tmp_path / audit_log.NAME).exists()
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert site_purge(tmp_path, "--older-than", "30") == 0
    assert not (folder / "secret").exists()


def test_a_run_that_may_go_on_stays_and_one_whose_last_round_was_served_goes_at_once(tmp_path, capsys):
    going, ended = lay(tmp_path, "going-1", 0.5, (1, 5)), lay(tmp_path, "ended-1", 0.0, (4, 5))
    assert site_purge(tmp_path, "--run", "going-1", "--run", "ended-1", "--yes") == 0
    stdout = capsys.readouterr().out
    assert "stays going-1, site north: 400 bytes, last round 0.5 days ago: it may resume" in stdout
    assert (going / "secret").exists()
    assert not (ended / "secret").exists()


def test_a_run_in_a_turn_or_in_a_worker_stays_however_old(tmp_path, monkeypatch):
    lay(tmp_path, "r-1", 40), lay(tmp_path, "r-1", 40, site="south")
    with ClientStateStore(tmp_path / "r-1" / "north").in_turn():
        assert [run.why for run in list_retained(tmp_path)] == ["a client round is in progress", ""]
    card = WorkerRecord("ab", 41, OwnerProcess(7, 1.0), "app", "key", 0.0)
    for says, why in (({"run": "r-1"}, "worker 41 holds it"), ({}, "worker 41 holds it"), ({"run": "s"}, "")):
        monkeypatch.setattr(module, "list_workers", lambda _, says=says: [WorkerStatus("north", card, says)])
        assert [run.why for run in list_retained(tmp_path)] == [why, ""]


def test_a_turn_of_the_app_holds_its_run(ask, tmp_path, monkeypatch):  # noqa: F811
    seen: list[str] = []
    trained = client._trained

    def watched(record, what):
        seen.extend(run.why for run in list_retained(tmp_path / "state"))
        return trained(record, what)

    monkeypatch.setattr(client, "_trained", watched)
    assert ask(0) == "all"
    assert seen == ["a client round is in progress"]


def test_a_run_that_goes_on_after_it_was_listed_stays(tmp_path):
    folder = lay(tmp_path, "r-1", 40)
    listed = list_retained(tmp_path)
    with ClientStateStore(folder).in_turn():
        assert purge_state(tmp_path, listed, []) == listed
    ReplayGuard(folder).count(1, 5, 3)
    assert purge_state(tmp_path, listed, []) == listed
    assert (folder / "secret").exists()


def test_a_run_whose_count_is_damaged_stays(tmp_path):
    folder = lay(tmp_path, "r-1", 40)
    (folder / "served.json").write_text("[]")
    age(folder, 40)
    (run,) = list_retained(tmp_path)
    assert "cannot read the record of served rounds" in run.why


def test_a_purged_run_is_not_served_again_from_no_round(ask, tmp_path):  # noqa: F811
    """Without the count that stays, round 0 would be served anew, from a new secret and no private state."""
    assert ask(1) == "top"
    age(tmp_path / "state" / "r", 40)
    assert site_purge(tmp_path / "state", "--older-than", "30", "--yes") == 0
    for round_ in (0, 1, 2):
        assert ask(round_) == "PolicyError: run.name: this site has purged all its state for this run; start a new run"
    assert not (tmp_path / "state" / "r" / "north" / "secret").exists()
    assert site_purge(tmp_path / "state", "--older-than", "0", "--yes") == 0
    assert ask(2).startswith("PolicyError: run.name: this site has purged")


def test_links_are_removed_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "rows").write_text("rows")
    state = tmp_path / "state"
    folder = lay(state, "r-1", 40)
    (folder / "link").symlink_to(outside)
    (state / "r-2").symlink_to(outside)
    (outside / "deep" / "secret").write_text("of nobody's run")
    age(folder, 40)
    age(outside, 40)
    assert site_purge(state, "--older-than", "30", "--yes") == 0
    assert not (folder / "link").is_symlink()
    assert (outside / "deep" / "rows").read_text() == "rows"
    assert (outside / "deep" / "secret").exists()


def test_leftovers_of_interrupted_writes_go_by_their_age(tmp_path):
    around(tmp_path)
    lay(tmp_path, "r-1", 0)
    parts = [
        tmp_path / name for name in (".ledger/.ledger.json.5.part", "workers/north/.ab.part", "r-1/north/.s.5.part")
    ]
    for part in parts:
        part.write_text("half")
    assert list_leftovers(tmp_path, 0) == []  # somebody may be writing them
    for part in parts:
        os.utime(part, (0, 0))
    assert set(list_leftovers(tmp_path, 30)) == set(parts)
    assert site_purge(tmp_path, "--older-than", "30", "--yes") == 0
    assert not any(part.exists() for part in parts)
    assert (tmp_path / "r-1" / "north" / "secret").exists()
    assert len(list(audit_log.read_log(tmp_path / audit_log.NAME))) == 3


def test_without_an_audit_log_nothing_is_removed(tmp_path):
    folder = lay(tmp_path, "r-1", 40)
    (tmp_path / audit_log.NAME).write_text("torn")
    assert site_purge(tmp_path, "--older-than", "30", "--yes") == 2
    assert (folder / "secret").exists()
    assert not ReplayGuard(folder).purged


@pytest.mark.parametrize(
    "arguments,reason",
    [
        ([], "--older-than: expected a number of days, or --run NAME, found neither"),
        (["--older-than", "-1"], "--older-than: expected a number of days, at least 0, found -1.0"),
        (["--older-than", "nan"], "--older-than: expected a number of days, at least 0, found nan"),
        (["--run", "other"], "--run: expected a run in .*, found 'other'; fedveil site status lists them"),
        (["--run", "workers"], "--run: expected a run in .*, found 'workers'"),
    ],
)
def test_what_shall_go_must_be_said_and_be_there(arguments, reason, tmp_path, capsys):
    around(tmp_path)
    lay(tmp_path, "r-1", 40)
    assert site_purge(tmp_path, *arguments, "--yes") == 2
    capsys.readouterr()
    before = contents(tmp_path)
    assert main(["site", "purge", "--state-dir", str(tmp_path), *arguments, "--yes"]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert contents(tmp_path) == before


def test_status_counts_the_bytes_by_run(tmp_path, capsys):
    lay(tmp_path, "r-1", 3), lay(tmp_path, "r-2", 40)
    site_purge(tmp_path, "--run", "r-2", "--yes")
    capsys.readouterr()
    assert main(["site", "status", "--state-dir", str(tmp_path)]) == 1  # no worker
    stdout = capsys.readouterr().out
    assert "r-1, site north: 400 bytes, last round 3.0 days ago" in stdout
    assert "r-2" not in stdout
    assert json.loads((tmp_path / "r-2" / "north" / "served.json").read_text())["purged"] is True
