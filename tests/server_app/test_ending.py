"""The card that a run leaves: written by the server when the run has ended, before anybody audits it."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from fedveil import strategies
from fedveil.cards import card as cards
from fedveil.config import parse
from fedveil.contract.method import State
from fedveil.records import audit_log, process
from fedveil.server_app import app, ending
from fedveil.server_app.record import RoundRecord, RunFolder

CONFIG = parse({"run.name": "pilot", "run.rounds": 2, "dp.clip": 1.0, "dp.noise": 2.0, "train.batch-size": 8})


def rounds(run: RunFolder) -> None:
    report = {"num_examples": 100, "steps": 3}
    for number in range(2):
        accepted = ["north", "south"]
        record = RoundRecord(number, 0, accepted, accepted, reports=dict.fromkeys(accepted, report), weights="ab")
        record.scores = {"server": {"loss": 3.0 - number}}
        run.round(record)


def test_it_has_what_the_folder_says_and_its_digest_is_in_the_log(tmp_path):
    method = strategies.create("fedrand")
    with RunFolder(tmp_path / "pilot") as run:
        run.config(CONFIG, method)
        rounds(run)
        run.final({"server": {}})
        run.checkpoint(State({}), {})
        run.resume(1, {})
        rounds(run)
        course = ending.Course(None, run.folder)
        course.scored(1, {})
        ending.leave_card(run, CONFIG, method, course)
        found = cards.read(tmp_path / "pilot" / "final")
        assert (found.run.name, found.run.id, found.run.rounds, found.run.resumed) == ("pilot", run.id, 2, 1)
    assert found.run.scores == {"loss": 2.0}
    assert [(site.site, site.participations, site.steps) for site in found.guarantee.sites] == [
        ("north", 4, 3), ("south", 4, 3),
    ]  # fmt: skip
    assert not found.audited.measured
    data = (tmp_path / "pilot" / "final" / "privacy.json").read_bytes()
    assert audit_log.last(tmp_path / audit_log.NAME)["card"] == hashlib.sha256(data).hexdigest()


def test_its_scores_are_those_of_the_round_whose_model_was_kept(tmp_path):
    rows = [{"round": n, "scores": {"server": {"loss": 3.0 - n, "old": 1.0}}} for n in range(3)] + [{"round": 3}]
    course = ending.Course(None, tmp_path)
    assert course.scores(rows) == {"loss": 1.0, "old": 1.0}
    course._kept = 1
    assert course.scores(rows) == {"loss": 2.0, "old": 1.0}
    course.final = {"server": {"loss": 1.9}}
    assert course.scores(rows) == {"loss": 1.9, "old": 1.0}


def test_a_run_that_a_signal_ended_says_so_and_how_it_goes_on(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "pilot") as run:
        run.config(CONFIG, strategies.create("fedrand"))
        assert ending.reason(SystemExit(0), run.folder) == "interrupted: its ServerApp was told to end"
        assert ending.reason(SystemExit(3), run.folder) == "SystemExit: 3"
        run.checkpoint(State({}), {})
        said = ending.reason(KeyboardInterrupt(), run.folder)
        assert said.startswith("interrupted: its ServerApp was told to end; resume it: fedveil submit --federation")
        monkeypatch.setenv(process.TEMPORARY, "1")
        said = ending.reason(SystemExit(0), run.folder)
        assert said.endswith("told to end; its federation was a temporary one: start the run anew")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_has_a_card_and_one_that_fails_has_none(tmp_path, monkeypatch, fails):
    method = strategies.create("fedrand")

    def run(grid, count):
        if fails:
            raise OSError("no disk")
        with_folder.final({"server": {}})

    def prepare(config, folder, name):
        nonlocal with_folder
        with_folder = folder
        folder.config(config, method)
        return SimpleNamespace(
            run=run, rounds=SimpleNamespace(method=method, course=ending.Course(None, folder.folder))
        )

    with_folder = None
    monkeypatch.setattr(app, "prepare", prepare)
    context = SimpleNamespace(run_config=CONFIG.flat() | {"run.dir": str(tmp_path)}, run_id=7)
    grid = SimpleNamespace(run=SimpleNamespace(fab_hash="ab" * 32))
    main = app.app._main
    if fails:
        with pytest.raises(OSError, match="no disk"):
            main(grid, context)
        assert not (tmp_path / "pilot" / "final").exists()
        return
    main(grid, context)
    found = cards.read(tmp_path / "pilot" / "final")
    assert found.digests.app == "ab" * 32
    assert json.loads((tmp_path / "pilot" / "status.json").read_text())["state"] == "completed"
