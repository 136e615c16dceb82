"""evaluate.validation-share in one process: the rows for training and selection, and the resulting model."""

from __future__ import annotations

import json

import pytest

from fedveil.attacks.samples import AuditDataSource, site_members
from fedveil.errors import ConfigError, TaskError
from fedveil.local import LocalFederation
from fedveil.records.tensor_state import state_digest
from tests.fedveil.local.small_federation import SITES, settings, write_federation

SHARE = {"evaluate__validation_share": 0.3, "evaluate__select_model": "best", "run__rounds": 4}


def rounds(local) -> list[dict]:
    """The lines of all rounds, without the scores before the first."""
    lines = (json.loads(line) for line in (local.results.folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "reports" in line]


def status(local) -> dict:
    return json.loads((local.results.folder / "status.json").read_text())


def test_the_servers_held_out_rows_decide_and_no_test_score_has_them(tmp_path):
    local = LocalFederation.from_config(settings(tmp_path, **SHARE), write_federation(tmp_path))
    run = local.run()
    lines = rounds(local)
    chosen = min(lines, key=lambda line: line["scores"]["validation"]["loss"])
    assert status(local)["best"]["round"] == chosen["round"]
    assert status(local)["best"]["split"] == "validation"
    assert state_digest(run.models["server"]) == chosen["weights"]
    server = tmp_path / "server"
    for split, view in (("test", "server"), ("validation", "validation")):
        assert run.evaluate(server, split) == pytest.approx(chosen["scores"][view])
        assert local.evaluate(server, split=split) == pytest.approx(chosen["scores"][view])
    assert lines[0]["scores"]["server"] != lines[0]["scores"]["validation"]
    assert any("test examples choose the model" in each for each in status(local)["reading"])


def test_each_site_holds_out_rows_that_it_never_trains_on_and_their_loss_decides(tmp_path):
    folders = write_federation(tmp_path)
    local = LocalFederation.from_config(settings(tmp_path, **SHARE) | {"task.evaluation": ""}, folders)
    local.run()
    lines = rounds(local)
    for site in SITES:
        for line in lines:
            report = line["reports"][site]
            assert report["num_examples"] + report["rows_held_out"] == 32
            assert 0 < report["rows_held_out"] < 20
    rows = {site: lines[0]["reports"][site]["rows_held_out"] for site in SITES}
    losses = [
        sum(line["reports"][site]["loss_held_out"] * rows[site] for site in SITES) / sum(rows.values())
        for line in lines[1:]  # of the models after rounds 0, 1 and 2
    ]
    best = losses.index(min(losses))
    assert status(local)["best"] == {
        "round": best, "metric": "loss", "value": pytest.approx(losses[best]), "kept": True, "split": "sites",
    }  # fmt: skip
    assert state_digest(local.results.models["server"]) == lines[best]["weights"]


def test_the_same_rows_are_held_out_in_every_run_and_added_rows_move_none(tmp_path):
    folders = write_federation(tmp_path)
    flat = settings(tmp_path, **SHARE) | {"task.evaluation": ""}
    held = []
    for seed in (0, 1, 2):
        if seed == 2:
            file = folders["north"] / "train.csv"
            file.write_text(file.read_text() + "9,9,9,9,1\n" * 8)
        local = LocalFederation.from_config(flat | {"run.seed": seed, "run.rounds": 1}, folders)
        local.run()
        held.append({site: rounds(local)[0]["reports"][site]["rows_held_out"] for site in SITES})
    assert held[0] == held[1]
    assert held[2]["south"] == held[0]["south"]
    assert held[0]["north"] <= held[2]["north"] <= held[0]["north"] + 8


def test_a_resumed_run_ends_with_the_model_of_the_whole_one(tmp_path):
    folders = write_federation(tmp_path)
    flat = settings(tmp_path, **SHARE) | {"task.evaluation": "", "run.dir": str(tmp_path / "runs")}
    whole = LocalFederation.from_config(flat | {"run.name": "whole"}, folders)
    whole.run()
    broken = LocalFederation.from_config(flat | {"run.name": "broken"}, folders)

    def die(now, round_):
        if round_ == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.run(die)
    resumed = LocalFederation.from_config(flat | {"run.name": "broken", "run.resume": True}, folders)
    resumed.run()
    assert status(resumed)["best"] == status(whole)["best"]
    assert state_digest(resumed.results.models["server"]) == state_digest(whole.results.models["server"])


def test_what_cannot_be_is_refused(tmp_path):
    folders = write_federation(tmp_path)
    flat = settings(tmp_path, **SHARE) | {"task.evaluation": ""}
    few = tmp_path / "few"
    few.mkdir()
    (few / "train.csv").write_text("1,2,3,4,1\n")
    with pytest.raises(TaskError, match="evaluate.validation-share: the site few needs at least one row"):
        LocalFederation.from_config(flat, folders | {"few": few})
    local = LocalFederation.from_config(flat, folders)
    with pytest.raises(ConfigError, match="evaluate.validation-share: the sites held out"):
        site_members(AuditDataSource(sites=folders), local.config, local.task, SITES, SITES)
