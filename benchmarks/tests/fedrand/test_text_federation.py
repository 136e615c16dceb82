"""The federations of one seed on a few texts: their common settings, and the rows that each score uses."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest

from benchmarks.tests.text_folder import settings
from fedveil_bench.common import texts
from fedveil_bench.fedrand import curves
from fedveil_bench.fedrand.source_losses import SourceLosses
from fedveil_bench.fedrand.text_federation import TextFederationSeed
from fedveil_bench.runner import BenchOptions

METHODS = {
    "FedAvg": {"name": "fedavg"},
    "all shared": {"name": "fedper", "fields": "layers = 9"},
    "FedPer": {"name": "fedper", "fields": "layers = 1"},
    "longer": {"name": "fedavg", "config": {"run.rounds": 3}},
}


@pytest.fixture
def seed(folder):
    asked = settings(METHODS) | {"data": "e2e_nlg", "client": "all", "clients_test": 2, "rate_test": 2}
    return TextFederationSeed(asked, 0, BenchOptions(device="cpu"))


def test_lines_of_another_form_are_read_as_rows_of_a_source_and_a_reference(folder):
    """DART: each reference a row, of its test part to train on and of halves of its dev part to look at."""
    asked = settings(METHODS) | {"data": "dart", "config": settings(METHODS)["config"] | {"task.partition": "iid"}}
    seed = TextFederationSeed(asked, 0, BenchOptions(device="cpu"))
    dealt = [row.values for rows in seed._rows.values() for row in rows]
    assert sorted(map(str, dealt)) == sorted(map(str, texts.load_rows("dart", "train")))
    assert len(dealt) == 16
    assert [row.values for row in seed._test] == texts.load_rows("dart", "test")
    assert [row.values for row in seed._validation] == texts.load_rows("dart", "validation")
    kept = seed._folder
    assert kept != folder / "dart"
    del seed
    gc.collect()  # a seed may be part of a cycle
    assert not kept.exists()


@pytest.mark.long
def test_a_method_that_shares_all_is_fedavg_and_other_rows_are_of_the_same_start(seed):
    fedavg, same, fedper = (seed.method(name, 3e-3) for name in ("FedAvg", "all shared", "FedPer"))
    assert same.scores["loss"] == pytest.approx(fedavg.scores["loss"], rel=1e-6)
    assert fedper.scores["loss"] != pytest.approx(fedavg.scores["loss"], rel=1e-4)
    assert fedavg.scores["learning_rate"] == 3e-3
    assert seed.before().scores["loss"] > fedavg.scores["loss"]
    assert seed.before().upload_bytes == 0
    assert seed.alone().upload_bytes == pytest.approx(fedavg.upload_bytes / 2, rel=1e-3)  # one site of two


def test_clients_with_a_model_are_all_scored_on_the_rows_for_them(seed):
    scores = seed.method("FedPer", 3e-3).scores
    assert {"client_loss", "client_bleu", "clients_loss", "clients_bleu"} <= set(scores)
    assert scores["clients_loss"] != pytest.approx(scores["client_loss"])
    assert len(seed._clients_test) == 2 < len(seed._test)
    assert "clients_loss" not in seed.method("FedAvg", 3e-3).scores


def test_losses_by_source_have_the_scores_as_their_means_and_are_of_the_same_sources(seed):
    runs = [seed.before(), seed.alone(), seed.method("FedPer", 3e-3)]
    for run in runs:
        for name, found in run.source_losses.items():
            losses = SourceLosses.from_json(found)
            assert losses.mean == pytest.approx(run.scores[name], rel=1e-5)
            assert len(losses.nats) == len({row.values["mr"] for row in seed._test})
    assert [set(run.source_losses) for run in runs] == [{"loss"}, {"loss"}, {"loss", "client_loss"}]


def test_every_seed_scores_the_first_sources(folder):
    asked = settings(METHODS) | {"data": "e2e_nlg"}
    asked["config"] = asked["config"] | {"evaluate.eval-examples": 2}
    seeds = [TextFederationSeed(asked, number, BenchOptions(device="cpu")) for number in (0, 1)]
    sources = [[row.values["mr"] for row in seed._test] for seed in seeds]
    assert sources[0] == sources[1] == [row["mr"] for row in texts.load_rows("e2e_nlg", "test")][:2]


def test_losses_that_are_not_those_of_the_score_are_left_out_and_said(seed, monkeypatch):
    lines = []
    monkeypatch.setattr(seed, "_options", replace(seed._options, say=lines.append))
    monkeypatch.setattr(SourceLosses, "agrees_with", lambda self, loss: False)
    assert seed.before().source_losses == {}
    assert "its interval will not cover the test rows" in lines[-1]


def test_a_trial_sees_validation_rows_alone_and_of_clients_with_models_all(seed, monkeypatch):
    monkeypatch.setattr(type(seed), "_test", property(lambda self: pytest.fail("a trial read test rows")))
    found = {name: seed.trial(name, 3e-3).scores for name in ("FedAvg", "FedPer")}
    assert [set(scores) for scores in found.values()] == [{"validation_loss"}] * 2
    assert found["FedAvg"]["validation_loss"] != pytest.approx(found["FedPer"]["validation_loss"])


def test_a_curve_begins_before_any_round_ends_with_the_last_and_costs_the_training_nothing(folder):
    asked = settings(METHODS) | {"data": "e2e_nlg", "curve_every": 2, "curve_test": 2}
    seed = TextFederationSeed(asked, 0, BenchOptions(device="cpu"))
    done = seed.method("longer", 3e-3)
    points = [curves.CurvePoint.from_json(point) for point in json.loads(json.dumps(done.curve))]
    assert [point.round for point in points] == [0, 2, 3]
    assert [point.upload_bytes for point in points][::2] == [0, done.upload_bytes]
    losses = [point.figures["loss"].value for point in points]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] != pytest.approx(done.scores["loss"])  # of two sources, not of all
    plain = TextFederationSeed(asked | {"curve_every": 0}, 0, BenchOptions(device="cpu")).method("longer", 3e-3)
    assert (plain.curve, plain.scores) == ([], done.scores)


def test_a_method_may_have_rounds_of_its_own(seed):
    assert [seed.method(name, 3e-3).rounds for name in ("FedAvg", "longer")] == [2, 3]
