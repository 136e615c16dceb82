"""Rounds that cannot succeed: no site trains for them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedveil.client_app.app import app
from fedveil.console.runs.progress_bar import round_underway
from fedveil.errors import QuorumError
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from fedveil.server_app import connected_sites, round_progress, rounds
from fedveil.server_app.run_folder import RunFolder
from fedveil.strategies.fedavg import FedAvg
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import RUN_CONFIG, initial, strategy

SITES = ["east", "north", "south"]
NO = 'methods = ["dp_fpl"]'


class Leaving(LocalGrid):
    """Sites that are gone while `away` holds."""

    away = staticmethod(lambda grid: [])

    def get_nodes(self):
        nodes = [NodeInfo(node_id=1000 + i, name=name) for i, name in enumerate(self.names)]
        return [node for node in nodes if node.name not in self.away(self)]


@pytest.fixture
def task(monkeypatch):
    return use_toy_task(monkeypatch)


@pytest.fixture
def grid(tmp_path, task):
    return Leaving(app, SITES, tmp_path / "state", RUN_CONFIG)


@pytest.mark.long
def test_with_too_few_sites_nobody_is_asked_to_train(grid, task):
    grid.away = lambda grid: ["south"] if len(grid.pushed) >= 3 else []
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2})
    with pytest.raises(
        QuorumError,
        match=r"round 2: at least 3 .* only 2 can \(connected: east, north; 2 of them",
    ):
        ours.start(grid, initial(task), num_rounds=2)
    assert len(grid.pushed) == 3


@pytest.mark.long
def test_a_site_that_comes_back_in_time_changes_nothing(grid, task, tmp_path):
    whole = strategy(FedAvg()).start(LocalGrid(app, SITES, tmp_path / "whole", RUN_CONFIG), initial(task), num_rounds=3)
    calls = []

    def away(grid):
        calls.extend(["asked"] if len(grid.pushed) == 3 else [])
        return ["south"] if 0 < len(calls) < 4 else []

    grid.away = away
    result = strategy(FedAvg(), cohort={"min_sites": 3, "wait_seconds": 30.0}).start(grid, initial(task), num_rounds=3)
    assert state_digest(result.arrays.to_torch_state_dict()) == state_digest(whole.arrays.to_torch_state_dict())
    assert len(grid.pushed) == 9
    assert len(calls) >= 4


@pytest.mark.long
def test_sites_that_refuse_are_named_and_the_others_train_once(grid, task, tmp_path):
    (tmp_path / "no.toml").write_text(NO)
    grid.node_config = {"south": {"policy": str(tmp_path / "no.toml")}}
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2})
    with pytest.raises(QuorumError, match="east, north, south; in the last attempt: south: PolicyError: meth"):
        ours.start(grid, initial(task), num_rounds=1)
    assert len(grid.pushed) == 3


def broken_ledger(grid, tmp_path) -> None:
    """South's ledger is damaged, in a state folder of its own."""
    ledger = tmp_path / "south" / ".ledger" / "ledger.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("{")
    grid.node_config = {"south": {"state-dir": str(tmp_path / "south")}}


@pytest.mark.long
def test_a_site_with_a_broken_ledger_is_not_asked_again_in_the_run(grid, task, tmp_path):
    """Each further attempt would be charged at the other sites, and end the same way."""
    broken_ledger(grid, tmp_path)
    ours = strategy(FedAvg(), folder=RunFolder(tmp_path / "run"), cohort={"min_sites": 2})
    ours.start(grid, initial(task), num_rounds=3)
    assert [record.accepted for record in ours.history] == [["east", "north"]] * 3
    assert ours.history[0].failed == {"south": "LedgerError at the site; see the site's log (code 2)"}
    assert [record.failed for record in ours.history[1:]] == [{}, {}]
    assert len(grid.pushed) == 3 + 2 + 2
    lines = [line for line in audit_log.read_log(tmp_path / audit_log.NAME) if line["event"] == "left-out"]
    assert [(line["site"], line["reason"]) for line in lines] == [("south", ours.history[0].failed["south"])]


@pytest.mark.long
def test_a_quorum_that_needs_a_site_with_a_broken_ledger_is_not_tried_twice(grid, task, tmp_path):
    broken_ledger(grid, tmp_path)
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2})
    words = (
        "no longer in this run: south, refused by its ledger, which must be repaired; correct it and submit again, "
        "or resume"
    )
    with pytest.raises(QuorumError, match=words):
        ours.start(grid, initial(task), num_rounds=1)
    assert len(grid.pushed) == 3


@pytest.mark.long
def test_the_wait_and_the_error_name_who_refused_and_the_next_step(grid, task, tmp_path, monkeypatch):
    (tmp_path / "no.toml").write_text(NO)
    grid.node_config = {"south": {"policy": str(tmp_path / "no.toml")}}
    progress_texts, real = [], round_progress.RoundProgressFile.awaits

    def awaits(self, *about):
        real(self, *about)
        progress_texts.append(round_underway(tmp_path / "run"))

    monkeypatch.setattr(round_progress.RoundProgressFile, "awaits", awaits)
    ours = strategy(FedAvg(), folder=RunFolder(tmp_path / "run"), cohort={"min_sites": 3, "max_retries": 2})
    with pytest.raises(
        QuorumError, match="no longer in this run: south, refused by its policy; correct it and submit again"
    ):
        ours.start(grid, initial(task), num_rounds=1)
    (words,) = progress_texts  # told once, not at every look
    assert words.startswith("waiting for sites: 2 of ")
    assert words.endswith(
        " s left); not waited for: south, refused by its policy; fix the policy and submit again, or resume"
    )


@pytest.mark.long
def test_a_round_that_draws_too_few_is_not_begun(grid, task):
    ours = strategy(FedAvg(), cohort={"fraction": 0.3})
    with pytest.raises(QuorumError, match="at least 2 sites .* only 1 can .*; 1 of them would be drawn"):
        ours.start(grid, initial(task), num_rounds=1)
    assert grid.pushed == []


@pytest.mark.long
def test_repeats_are_apart(grid, task, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(seconds))
    grid.tamper = {"south": lambda message, reply: None}
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2, "wait_seconds": 3.0, "deadline_seconds": 0.01})
    with pytest.raises(QuorumError, match="the last of 3 attempts had only 2"):
        ours.start(grid, initial(task), num_rounds=1)
    assert [seconds for seconds in waited if seconds >= 1] == [2.0, 3.0]


@pytest.mark.long
def test_a_site_that_died_in_its_turn_is_waited_for_until_it_is_back(grid, task):
    """For a minute Flower has it as connected; the others would train for it in vain."""
    lost, looks, pushed = [], [], []

    def away(grid):
        if not lost:
            return []
        looks.append(len(looks))
        if 10 <= len(looks) < 13:
            pushed.append(len(grid.pushed))
            return ["south"]
        return []

    def once(message, reply):
        lost.append(reply)
        return None if len(lost) == 1 else reply

    grid.away, grid.tamper = away, {"south": once}
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2, "wait_seconds": 30.0, "deadline_seconds": 0.5})
    ours.start(grid, initial(task), num_rounds=1)
    assert pushed == [3, 3, 3]
    assert len(grid.pushed) == 6


@pytest.mark.long
def test_a_site_that_is_silent_and_stays_is_asked_again_once_flower_would_have_noticed(grid, task, monkeypatch):
    monkeypatch.setattr(connected_sites, "_GONE_SECONDS", 1.0)
    monkeypatch.setattr(rounds, "_BACK_OFF_SECONDS", 0.0)
    began, lost = time.monotonic(), []
    grid.tamper = {"south": lambda message, reply: lost.append(time.monotonic())}
    ours = strategy(FedAvg(), cohort={"min_sites": 3, "max_retries": 2, "wait_seconds": 60.0, "deadline_seconds": 0.01})
    with pytest.raises(QuorumError, match="the last of 3 attempts had only 2"):
        ours.start(grid, initial(task), num_rounds=1)
    assert len(grid.pushed) == 9
    assert time.monotonic() - began >= 2.0


@pytest.mark.parametrize("seconds", [900.0, 7200.0])
def test_a_round_has_the_seconds_that_the_config_gives_it(grid, task, monkeypatch, seconds):
    """Flower's own bound of an hour is one of `start` alone."""
    given = []
    monkeypatch.setattr(
        rounds.RoundLoop, "run_round", lambda self, grid, number, total, deadline, config: given.append(deadline)
    )
    ours = strategy(FedAvg(), cohort={"deadline_seconds": seconds})
    ours.run(grid, 2)
    assert given == [seconds, seconds]


def test_where_sites_failed_by_errors_of_their_own_the_next_step_is_to_mend_those():
    def after(**failed):
        return connected_sites.suggest_remedy(SimpleNamespace(failed=failed))

    assert after(south="TaskError: expected column x").startswith("correct these causes. A resumed run repeats")
    assert after(south="TaskError: expected column x", north="no reply within 9 s").startswith(
        "start the missing sites"
    )
    assert after(south="PolicyError: method").startswith("no longer in this run: south, refused by its policy")
    assert connected_sites.suggest_remedy(None).startswith("start the missing sites")
    assert connected_sites.suggest_remedy(None, {"south": "BudgetError: spent"}).startswith(
        "no longer in this run: south, refused by its ledger; see the sites' logs"
    )
    assert after().startswith("start the missing sites")
