"""The card that a run leaves: written by the server when the run has ended, before anybody audits it."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from fedveil import strategies
from fedveil.cards import card as cards
from fedveil.config import parse
from fedveil.contract.method import FederatedState
from fedveil.records import audit_log, process_exit
from fedveil.server_app import app, completion
from fedveil.server_app import run as server_run
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder

CONFIG = parse(
    {
        "run.name": "pilot",
        "run.rounds": 2,
        "dp.clip-norm": 1.0,
        "dp.noise-multiplier": 2.0,
        "train.batch-size": 8,
        "task.max-tokens": 96,
    }
)


def rounds(run: RunFolder) -> None:
    report = {"num_examples": 100, "steps": 3}
    for number in range(2):
        accepted = ["north", "south"]
        reports, scores = dict.fromkeys(accepted, report), {"server": {"loss": 3.0 - number}}
        run.round(RoundRecord(number, 0, accepted, accepted, reports=reports, weights="ab", scores=scores))


def test_it_has_what_the_folder_says_and_its_digest_is_in_the_log(tmp_path):
    method = strategies.create_method("fedrand")
    with RunFolder(tmp_path / "pilot") as run:
        run.config(CONFIG, method)
        rounds(run)
        run.final({"server": {}})
        run.checkpoint(FederatedState({}), {})
        run.resume(1, {})
        rounds(run)
        course = completion.BestRoundTracker(None, run.folder)
        course.scored(1, {})
        completion.leave_card(run, CONFIG, method, course)
        privacy_card = cards.read_card(tmp_path / "pilot" / "final")
        assert (privacy_card.run.name, privacy_card.run.id, privacy_card.run.rounds, privacy_card.run.resumed) == (
            "pilot",
            run.id,
            2,
            1,
        )
    assert privacy_card.run.scores == {"loss": 2.0}
    assert [(site.site, site.participations, site.steps) for site in privacy_card.guarantee.sites] == [
        ("north", 4, 3), ("south", 4, 3),
    ]  # fmt: skip
    assert not privacy_card.audited.measured
    data = (tmp_path / "pilot" / "final" / "privacy.json").read_bytes()
    assert audit_log.last_entry(tmp_path / audit_log.NAME)["card"] == hashlib.sha256(data).hexdigest()


def test_its_scores_are_those_of_the_round_whose_model_was_kept(tmp_path):
    rows = [{"round": n, "scores": {"server": {"loss": 3.0 - n, "old": 1.0}}} for n in range(3)] + [{"round": 3}]
    course = completion.BestRoundTracker(None, tmp_path)
    assert course.scores(rows) == {"loss": 1.0, "old": 1.0}
    course._kept = 1
    assert course.scores(rows) == {"loss": 2.0, "old": 1.0}
    course.final = {"server": {"loss": 1.9}}
    assert course.scores(rows) == {"loss": 1.9, "old": 1.0}


def test_a_run_that_a_signal_ended_says_so_and_how_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv(process_exit.LAST_ANSWER, raising=False)  # of another test
    with RunFolder(tmp_path / "pilot") as run:
        run.config(CONFIG, strategies.create_method("fedrand"))
        assert completion.failure_reason(SystemExit(0), run.folder) == "interrupted: its ServerApp was told to end"
        assert completion.failure_reason(SystemExit(3), run.folder) == "SystemExit: 3"
        run.checkpoint(FederatedState({}), {})
        reason = completion.failure_reason(KeyboardInterrupt(), run.folder)
        assert reason.startswith("interrupted: its ServerApp was told to end; resume it: fedveil submit --federation")
        monkeypatch.setenv(process_exit.TEMPORARY, "1")
        reason = completion.failure_reason(SystemExit(0), run.folder)
        assert reason.endswith("told to end; its federation was temporary: start the run again")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_has_a_card_and_one_that_fails_has_none(tmp_path, monkeypatch, fails):
    method = strategies.create_method("fedrand")

    def run(grid, count):
        if fails:
            raise OSError("no disk")
        with_folder.final({"server": {}})

    def prepare(plan, folder, signer, app):
        assert signer is None
        nonlocal with_folder
        with_folder = folder
        folder.config(plan.config, method)
        return SimpleNamespace(
            run=run, rounds=SimpleNamespace(method=method, course=completion.BestRoundTracker(None, folder.folder))
        )

    with_folder = None
    monkeypatch.setattr(server_run, "prepare_strategy", prepare)
    context = SimpleNamespace(run_config=CONFIG.flat() | {"run.dir": str(tmp_path)}, run_id=7)
    grid = SimpleNamespace(run=SimpleNamespace(fab_hash="ab" * 32))
    main = app.app._main
    if fails:
        with pytest.raises(OSError, match="no disk"):
            main(grid, context)
        assert not (tmp_path / "pilot" / "final").exists()
        return
    main(grid, context)
    privacy_card = cards.read_card(tmp_path / "pilot" / "final")
    assert privacy_card.digests.app == "ab" * 32
    assert json.loads((tmp_path / "pilot" / "status.json").read_text())["state"] == "completed"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_a_run_that_lost_contact_is_not_called_one_that_was_stopped(error, tmp_path, monkeypatch):
    monkeypatch.delenv(process_exit.LAST_ANSWER, raising=False)
    assert completion.failure_reason(error, tmp_path).startswith(process_exit.TOLD_TO_END)
    monkeypatch.setenv(process_exit.LAST_ANSWER, str(process_exit.boot_seconds() - 300))
    reason = completion.failure_reason(error, tmp_path)
    assert reason.startswith("contact lost: the ServerApp had no answer from the SuperLink for 300 s")
    assert "sites keep the charge" in reason


@pytest.mark.parametrize("free", [1 << 20, 1 << 40])
def test_a_500_of_the_superlink_is_told_with_its_cause(free, tmp_path, monkeypatch):
    """On a full disk the ServerApp sees only the answer."""
    monkeypatch.setattr(process_exit.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    error = RuntimeError("Server error '500 Internal Server Error' for url 'https://127.0.0.1:8000/v1/runtime'")
    reason = completion.failure_reason(error, tmp_path)
    words = (
        f"the disk of {tmp_path} is full (1 MB free): free some disk space" if free < 1 << 30 else "the SuperLink's log"
    )
    assert words in reason
    assert "disk" not in completion.failure_reason(RuntimeError("another"), tmp_path)
