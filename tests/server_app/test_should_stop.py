"""`start(should_stop=)`: a caller ends a run between two rounds, and the run ends in order."""

from __future__ import annotations

import json

import pytest
from flwr.app import ArrayRecord

from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig
from fedveil.records.tensor_state import load_state, state_digest
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east"]
FLAT = {"run.deterministic": True, "run.seed": 9}
COHORT = CohortConfig(min_sites=2, deadline_seconds=5.0, wait_seconds=1.0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    task = use_toy_task(monkeypatch)

    def run(name, should_stop=None, rounds=4, resume=False):
        with RunFolder(tmp_path / name, resume) as folder:
            ours = MethodStrategy(FedAvg(), RunSettings(COHORT, seed=9, deterministic=True), folder=folder)
            grid = LocalGrid(app, SITES, tmp_path / f"sites-{name}", FLAT)
            weights = ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights"))))
            result = ours.start(grid, weights, rounds, should_stop=should_stop)
            course = ours.rounds.course
            folder.status("completed", course.done, rounds, course.stopped(rounds), **course.about)
        return result, ours, tmp_path / name

    return run


def weights_of(result) -> str:
    return state_digest(result.arrays.to_torch_state_dict())


@pytest.mark.long
def test_a_run_ends_in_order_after_the_round_after_which_it_is_told_to(run):
    asked = []

    def should_stop(server_round, result):
        asked.append((server_round, weights_of(result), sorted(result.train_metrics_clientapp)))
        return server_round == 2

    result, ours, folder = run("told", should_stop)
    assert [record.round for record in ours.history] == [0, 1]
    assert [(r, rounds) for r, _, rounds in asked] == [(1, [1]), (2, [1, 2])]
    assert [weights for _, weights, _ in asked] == [record.weights for record in ours.history]
    assert weights_of(result) == ours.history[1].weights == weights_of(run("two", rounds=2)[0])
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["round"]) == ("completed", 1)
    assert status["reason"] == "stopped early, after round 2: should_stop, which was passed to start(), returned true"
    assert state_digest(load_state(folder / "final" / "server.safetensors").tensors) == ours.history[1].weights

    resumed, later, _ = run("told", resume=True)
    assert [record.round for record in later.history] == [2, 3]
    assert weights_of(resumed) == weights_of(run("whole")[0])


def test_it_is_asked_after_the_last_round_too_and_nothing_is_said_then(run):
    asked = []
    _, _, folder = run("all", lambda server_round, result: asked.append(server_round) or server_round == 4)
    assert asked == [1, 2, 3, 4]
    assert json.loads((folder / "status.json").read_text())["reason"] == ""


def test_the_next_start_of_the_same_strategy_is_not_told_by_the_last(monkeypatch, tmp_path):
    task = use_toy_task(monkeypatch)
    ours = MethodStrategy(FedAvg(), RunSettings(COHORT, seed=9, deterministic=True))
    weights = ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights"))))
    ours.start(LocalGrid(app, SITES, tmp_path / "one", FLAT), weights, 4, should_stop=lambda *about: True)
    ours.start(LocalGrid(app, SITES, tmp_path / "two", FLAT), weights, 4)
    assert [record.round for record in ours.history] == [0, 0, 1, 2, 3]
