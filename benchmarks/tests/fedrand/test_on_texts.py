"""Tables on texts: a seed's rows, the learning rate that is kept, work that is not repeated, and the claims."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.check import result_file
from fedveil.errors import ConfigError
from fedveil_bench.common import resampling
from fedveil_bench.fedrand import curves, on_texts, source_losses
from fedveil_bench.fedrand.source_losses import SourceLosses
from fedveil_bench.fedrand.text_federation import TextFederationRun
from fedveil_bench.runner import BenchOptions

CLAIM = {"metric": "loss", "row": "FedRand", "than": "FedAvg", "is": "not higher", "margin": 0.02}
SETTINGS = {
    "seeds": 2,
    "reference": "FedAvg",
    "compare": ["loss"],
    "config": {"train.learning-rate": 1e-3, "run.rounds": 3},
    "methods": {"FedAvg": {"name": "fedavg"}, "FedRand": {"name": "fedrand"}},
}
GRID = SETTINGS | {"learning_rates": [3e-4, 1e-3, 3e-3], "rate_seed": 100}


def run_of(loss: float, bytes_: int = 10, **more: float) -> TextFederationRun:
    return TextFederationRun({"loss": loss, **more}, bytes_, 7, 1.0, 3, "0123")


def of_seed(loss: float, more: float = 0.0, bytes_: int = 10) -> dict[str, TextFederationRun]:
    around = {on_texts.BEFORE: run_of(9.0, 0), on_texts.ALONE: run_of(8.0)}
    return around | {"FedAvg": run_of(loss), "FedRand": run_of(loss + more, bytes_)}


def outcome(done, **settings):
    return on_texts.build_outcome(done, SETTINGS | {"chosen": dict.fromkeys(SETTINGS["methods"], 1e-3)} | settings)


@pytest.mark.parametrize(("more", "word"), [(0.004, "holds here."), (0.1, "does not hold here.")])
def test_claims_are_judged_over_the_seeds_which_keep_their_values(more, word):
    losses = (1.6, 1.9, 1.7, 1.8, 1.5)
    done = [of_seed(v, more * (1 + i / 9), 5) for i, v in enumerate(losses)]
    found = outcome(done, claims=[CLAIM])
    by_name = {row["name"]: row for row in found.rows}
    assert by_name["FedAvg"]["metrics"]["loss"]["seeds"] == list(losses)
    assert by_name["FedRand"]["upload_bytes"] == 5
    assert any(said.endswith(f"the claim has it not higher (within 0.02): {word}") for said in found.verdicts)
    assert "FedRand: uploads are 0.5000 of FedAvg's bytes." in found.verdicts
    assert "5 seeds" in found.differences[-1]


def test_two_seeds_decide_no_claim():
    said = outcome([of_seed(1.5), of_seed(1.6)], claims=[CLAIM]).verdicts
    assert any("not decided." in each for each in said)
    assert any("2 seeds are too few to decide" in each for each in said)


def with_losses(run: TextFederationRun, shift: float) -> TextFederationRun:
    """Ten sources whose losses differ much, of which the run is better or worse by `shift` on all alike."""
    tokens = np.arange(10.0, 20.0)
    nats = tokens * (run.scores["loss"] + np.linspace(-1, 1, 10) + shift)
    losses = SourceLosses(nats, tokens)
    scores = {**run.scores, "loss": losses.mean}
    return replace(run, scores=scores, source_losses={"loss": losses.to_json()})


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (("loss",), "over rows and seeds;"),
        (("loss", "bleu"), "over rows and seeds, but of bleu over seeds, one test set;"),
        (("bleu",), "over seeds, one test set;"),
    ],
)
def test_intervals_of_losses_cover_the_test_sources_which_are_paired_and_kept(metrics, said):
    done = []
    for loss in (1.5, 1.6, 1.7, 1.55):
        each = {
            name: replace(run, scores={**run.scores, "bleu": 40 + loss}) for name, run in of_seed(loss, 0.1).items()
        }
        done.append({name: with_losses(run, 0.0) for name, run in each.items()})
    margin = {"loss": 0.2, "bleu": 3.0}
    found = outcome(done, claims=[CLAIM | {"metric": metric, "margin": margin[metric]} for metric in metrics])
    assert f"95 % each, {said}" in next(text for text in found.verdicts if "corrected for" in text)
    by_name = {row["name"]: row for row in found.rows}
    metric = by_name["FedAvg"]["metrics"]["loss"]
    over_seeds = resampling.compute_interval(on_texts.figures_of([r["FedAvg"].scores for r in done])["loss"])
    assert metric["mean"] == pytest.approx(over_seeds["mean"])
    assert metric["high"] - metric["low"] > 1.5 * (over_seeds["high"] - over_seeds["low"])
    # All sources change equally, so that the paired difference has no noise from rows.
    if "loss" in metrics:
        text = next(text for text in found.verdicts if text.startswith("loss of FedRand less that of FedAvg"))
        assert "+0.100 [+0.100, +0.100]" in text
    kept = by_name["FedRand"]["source_losses"]["loss"]
    assert len(kept["nats"]) == 4
    result = {"rows": found.rows, "verdicts": [text for text in found.verdicts if not text.startswith("Rows: ")]}
    check = result_file.check_result("texts", json.loads(json.dumps(result)), Path())
    assert check.mismatches == []
    by_name["FedRand"]["source_losses"]["loss"]["nats"][0] = kept["nats"][1]
    assert result_file.check_result("texts", result, Path()).mismatches != []


def test_seeds_with_other_sources_are_refused():
    one = SourceLosses(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    with pytest.raises(ValueError, match="the same sources"):
        source_losses.resample_losses([1.5, 1.5], [one, SourceLosses(one.nats, np.array([1.0, 2.0]))])


def test_rows_of_which_a_run_keeps_no_losses_are_over_seeds():
    done = [of_seed(loss) for loss in (1.5, 1.6, 1.7)]
    done[0]["FedAvg"] = with_losses(done[0]["FedAvg"], 0.0)
    assert "source_losses" not in outcome(done).rows[2]
    said = outcome(done, claims=[CLAIM]).verdicts
    assert any("over seeds, one test set;" in text for text in said)


def with_curve(done: TextFederationRun, first: float, per_round: int) -> TextFederationRun:
    """Down to its own loss in three rounds, in equal steps."""
    last = done.scores["loss"]
    at = [first + (last - first) * i / 3 for i in range(4)]
    points = [
        curves.CurvePoint(i, per_round * i, 0, {"loss": resampling.from_constant(loss)}) for i, loss in enumerate(at)
    ]
    return replace(done, curve=[point.to_json() for point in points])


def test_rows_with_a_curve_show_it_and_say_what_the_reference_s_loss_cost_them():
    done = []
    for loss in (1.5, 1.6, 1.7):
        each = of_seed(loss)
        curved = {
            "FedAvg": with_curve(each["FedAvg"], 3.0, 2_000_000),
            "FedRand": with_curve(each["FedRand"], 3.0, 10**6),
        }
        done.append(each | curved)
    found = outcome(done, curve_targets=[{"row": "FedAvg", "metric": "loss", "margin": 0.02}])
    by_name = {row["name"]: row for row in found.rows}
    assert "curve" not in by_name["round 0"]
    assert [(at["round"], at["upload_bytes"]) for at in by_name["FedRand"]["curve"]][-1] == (3, 3_000_000)
    assert by_name["FedAvg"]["curve"][-1]["metrics"]["loss"]["mean"] == pytest.approx(1.6)
    assert any("of FedRand less those of FedAvg" in said and "0.50 of them: fewer" in said for said in found.verdicts)


def test_a_seed_of_which_a_row_is_missing_is_in_no_row_and_said_so():
    half = of_seed(5.0)
    del half["FedRand"]
    found = outcome([of_seed(1.5), half])
    assert found.rows[2]["metrics"]["loss"]["mean"] == 1.5
    assert "Rows: 7 of 8; seeds of which all are there: 1 of 2; by commit: 7 of 0123." in found.verdicts
    assert outcome([half]).rows == []


def test_a_score_that_a_seed_lacks_is_left_out():
    assert list(on_texts.figures_of([{"loss": 1.0, "client_loss": 2.0}, {"loss": 3.0}])) == ["loss"]


def test_the_learning_rate_of_least_validation_loss_is_kept_and_one_that_diverged_never():
    given = (3e-4, 1e-3, 3e-3)
    assert on_texts.find_best_rate(list(zip((1.7, 1.5, 1.6), given, strict=True))) == 1e-3
    assert on_texts.find_best_rate(list(zip((math.nan, 1.7, math.inf), given, strict=True))) == 1e-3
    assert on_texts.find_best_rate(list(zip((1.5, 1.5, 1.6), given, strict=True))) == 3e-4


class Seeds:
    """In place of `TextFederationSeed`: remembers what ran. FedAvg is best at 1e-3 and FedRand at 3e-3."""

    ran: list[tuple]

    def __init__(self, settings, number, options):
        self.number = number

    def before(self):
        return self.note("before", 0.0)

    def alone(self):
        return self.note("alone", 0.0)

    def trial(self, label, rate):
        self.note(label, rate, "trial")
        return TextFederationRun({"validation_loss": abs(rate - (1e-3 if label == "FedAvg" else 3e-3))}, 1, 1, 0.0)

    def method(self, label, rate):
        return self.note(label, rate)

    def note(self, label, rate, *more):
        Seeds.ran.append((label, self.number, rate, *more))
        return run_of(rate)


@pytest.fixture
def ran(monkeypatch):
    Seeds.ran = []
    monkeypatch.setattr(on_texts, "TextFederationSeed", Seeds)
    monkeypatch.setattr(
        on_texts.seeds,
        "run_seeds",
        lambda module, settings, options, in_pieces: [
            on_texts.of_seed(settings, seed, options) for seed in range(options.seeds or settings["seeds"])
        ],
    )
    return Seeds.ran


def test_rates_are_chosen_on_a_seed_that_is_in_no_row_and_every_seed_has_the_same(ran):
    found = on_texts.run_benchmark(GRID, BenchOptions())
    trials = [each for each in ran if each[-1] == "trial"]
    assert trials == [(name, 100, rate, "trial") for rate in GRID["learning_rates"] for name in GRID["methods"]]
    rows = [each for each in ran if each[0] in GRID["methods"] and each not in trials]
    assert rows == [(name, seed, rate) for seed in (0, 1) for name, rate in (("FedAvg", 1e-3), ("FedRand", 3e-3))]
    assert "Learning rate 0.003, at the grid's edge: FedRand." in found.verdicts
    assert "Learning rate 0.001: FedAvg." in found.verdicts


def test_one_rate_needs_no_trial(ran):
    found = on_texts.run_benchmark(SETTINGS, BenchOptions())
    assert not [each for each in ran if each[-1] == "trial"]
    assert [row["name"] for row in found.rows] == ["round 0", "one client alone", "FedAvg", "FedRand"]
    assert not [said for said in found.verdicts if "Learning rate" in said]


def test_what_the_file_has_is_not_run_again_but_for_other_settings(ran, tmp_path):
    options = BenchOptions(pieces=tmp_path / "x.pieces.jsonl")
    first = on_texts.run_benchmark(GRID, options)
    once = list(ran)
    again = on_texts.run_benchmark(GRID, options)
    assert ran == once
    assert again.rows == first.rows
    changed = GRID["methods"] | {"FedRand": {"name": "fedrand", "fields": "rho = 0.3"}}
    on_texts.run_benchmark(GRID | {"methods": changed}, options)
    assert {each[0] for each in ran[len(once) :]} == {"FedRand"}
    before = len(ran)
    on_texts.run_benchmark(GRID | {"config": GRID["config"] | {"run.rounds": 4}}, options)
    assert len(ran) == before + len(once)


def test_without_time_there_is_no_rate_and_no_row(ran, tmp_path):
    options = BenchOptions(pieces=tmp_path / "x.pieces.jsonl", minutes=0.0)
    assert on_texts.choose_rates(GRID, options) == {}
    assert on_texts.run_benchmark(GRID, options).rows == []
    assert ran == []
    on_texts.run_benchmark(GRID, replace(options, minutes=None))
    assert len(on_texts.run_benchmark(GRID, options).rows) == 4


def test_validation_rows_are_asked_for_where_rates_are_chosen():
    settings = {"data": "e2e_nlg", "config": {}}
    assert on_texts.list_requirements(settings)[0].splits == ("train", "test")
    assert on_texts.list_requirements(settings | {"learning_rates": [1e-3]})[0].splits == (
        "train",
        "validation",
        "test",
    )


def test_a_claim_about_no_row_is_refused():
    with pytest.raises(ConfigError, match='claims: expected a row with that metric, found no "FedPer"'):
        outcome([of_seed(1.0)] * 3, claims=[CLAIM | {"row": "FedPer"}])
