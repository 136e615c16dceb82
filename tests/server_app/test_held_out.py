"""Scores of held-out rows over a whole run: Flower's messages in this process, real turns, the run folder."""

from __future__ import annotations

import json

import pytest
from flwr.app import ArrayRecord

from fedveil import rng, strategies
from fedveil.client_app.app import app
from fedveil.config import parse
from fedveil.console.runs import per_site
from fedveil.console.runs import run_reader as runs_folder
from fedveil.contract.task import Example, class_metrics
from fedveil.records import disclosure_ledger
from fedveil.records.tensor_state import load_state, state_digest
from fedveil.server_app.evaluation import ModelSelection
from fedveil.server_app.flower_strategy import MethodStrategy, _mean_report
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from tests.conftest import ToyTrainer
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east", "south", "west"]
POLICIES = {"north": "max-scores = 9", "east": "max-scores = 1", "south": "max-scores = 9"}  # the west has no policy
# The toy's steps are large, and a site's sketch of a broadcast is random: a default bound would be passed at times.
BOUNDS = "max-broadcast-change = 100.0\nmax-broadcast-drift = 100.0\n"
PERMITS = '[permits]\n"cohort.wait-seconds" = 1.0\n'


class Scoring(ToyTrainer):
    """Whose loss is the sum of the entries over the rows."""

    def mean_loss(self, weights, rows):
        return float(sum(w.sum() for w in weights.values())) / len(rows)


@pytest.fixture
def run(monkeypatch, tmp_path):
    return run_with(monkeypatch, tmp_path, POLICIES, **{"evaluate.held-out": 0.3})


def run_with(monkeypatch, tmp_path, policies, **keys):
    task = use_toy_task(monkeypatch)
    counts = {"south": 100, "north": 800}  # so that east and north never hold out equally many, nor east too few
    real = type(task).examples

    def examples(data, split, share=None):
        return Example.from_columns([{"mr": "a", "ref": "b"}] * counts.get(sorted(SITES)[share.index], 400))

    monkeypatch.setattr(task, "examples", examples)
    monkeypatch.setattr(task, "trainer", lambda rows, rng, watch=None, round_=0: Scoring(task.spec, len(rows)))
    assert real is not examples
    flat = {"run.name": "run", "run.rounds": 3, "cohort.min-sites": 4, "cohort.wait-seconds": 1.0}
    config = parse(flat | {"method.name": "fedavg"} | keys)
    method = strategies.create_method("fedavg", "")
    grid = LocalGrid(app, SITES, tmp_path / "sites", config.flat())
    more = "".join(f'"{key}" = {json.dumps(value)}\n' for key, value in keys.items() if key != "evaluate.held-out")
    for site, text in policies.items():
        grid.node_config[site] = {"policy": str(tmp_path / f"{site}.toml")}
        permits = '"cohort.min-sites" = 4\n"run.name" = "run"\n"run.rounds" = 3\n"method.name" = "fedavg"\n'
        (tmp_path / f"{site}.toml").write_text(f"{text}\n{BOUNDS}{PERMITS}{permits}{more}")
    with RunFolder(tmp_path / "run") as folder:
        folder.config(config, method)
        choice = ModelSelection.from_config(config, class_metrics(config.task), method)
        ours = MethodStrategy(method, RunSettings.from_config(config, "run", choice), folder=folder, spec=task.spec)
        ours.start(grid, ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights")))), 3)
    return ours, tmp_path / "run"


def test_each_site_answers_as_its_policy_has_it_and_no_turn_fails(run):
    ours, folder = run
    assert all(sorted(record.accepted) == sorted(SITES) and not record.failed for record in ours.history)
    reports = [record.reports for record in ours.history]
    assert ["loss_held_out" in each["north"] for each in reports] == [True, True, True]
    assert ["loss_held_out" in each["east"] for each in reports] == [True, False, False]
    assert [each["east"].get("held_out_refused") for each in reports] == [None, 3, 3]
    assert [each["south"].get("held_out_refused") for each in reports] == [2, 2, 2]
    assert [each["west"].get("held_out_refused") for each in reports] == [1, 1, 1]
    north = reports[0]["north"]
    assert north["num_examples"] + north["rows_held_out"] == 800
    assert reports[0]["south"]["num_examples"] == 100
    assert reports[0]["west"]["num_examples"] == 400
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["reports"] for row in rows if "reports" in row] == reports


def test_the_sites_scores_choose_the_model_and_sites_that_send_none_change_nothing(monkeypatch, tmp_path):
    """The west has no policy and so sends no score, and the south has too few rows."""
    policies = dict.fromkeys(["north", "east", "south"], "max-scores = 9")
    keys = {"evaluate.validation-share": 0.3, "evaluate.select-model": "best"}
    ours, folder = run_with(monkeypatch, tmp_path, policies, **keys)
    losses = [per_site.mean_scored(record.reports) for record in ours.history[1:]]  # of the models after rounds 1, 2
    best = min(range(2), key=lambda round_: losses[round_][0])
    assert [sites for _, _, sites in losses] == [2, 2]
    assert ours.rounds.course.best.sites == ("east", "north")
    assert ours.rounds.course.about["best"] == {
        "round": best, "metric": "loss", "value": pytest.approx(losses[best][0]), "kept": True, "split": "sites",
    }  # fmt: skip
    final = load_state(folder / "final" / "server.safetensors").tensors
    assert state_digest(final) == ours.history[best].weights != ours.history[2].weights


def test_the_mean_is_weighted_with_held_out_rows(run):
    ours, folder = run
    first = ours.history[0]
    reports = [first.reports[site] for site in ("north", "east")]
    rows = sum(each["rows_held_out"] for each in reports)
    mean = sum(each["loss_held_out"] * each["rows_held_out"] for each in reports) / rows
    assert reports[0]["rows_held_out"] != reports[1]["rows_held_out"]
    assert _mean_report(first)["loss_held_out"] == pytest.approx(mean)
    assert "held_out_refused" not in _mean_report(first)
    assert per_site.mean_scored(first.reports) == (pytest.approx(mean), rows, 2)
    records = {site.name: site.held_out for site in per_site.records_by_site(runs_folder.load_run(folder))}
    assert records["north"].round == 2
    assert records["north"].loss == ours.history[2].reports["north"]["loss_held_out"]
    assert "max-scores" in records["east"].why


def test_both_records_of_what_left_a_site_list_the_figures_with_their_bytes(run):
    ours, folder = run
    for message in disclosure_ledger.read_messages(folder / disclosure_ledger.NAME):
        if message["direction"] == "down":
            assert message["figures"] == {}
            continue
        report = ours.history[message["round"]].reports[message["site"]]
        asked = {name: len(json.dumps(report[name])) for name in report if "held_out" in name}
        assert message["figures"] == asked
        assert asked
    lines = [json.loads(line) for line in (folder.parent / "audit-log.jsonl").read_text().splitlines()]
    accepted = [line for line in lines if line["event"] == "accepted"]
    assert len(accepted) == 12
    assert all(line["figures"] for line in accepted)
