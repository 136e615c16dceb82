"""Tables on texts: what a seed's runs become, which learning rate is kept, and what the claims say."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from fedveil.benchmarks.fedrand import on_texts
from fedveil.benchmarks.run import Options
from fedveil.errors import ConfigError

CLAIM = {"metric": "loss", "row": "FedRand", "than": "FedAvg", "is": "not higher", "margin": 0.02}


def measured(loss: float, bytes_: int = 10, **more: float) -> dict:
    return {"scores": {"loss": loss, **more}, "upload_bytes": bytes_, "download_bytes": 7, "seconds": 1.0}


def outcome(monkeypatch, of_seeds, **settings):
    """What `run` makes of the runs of the seeds, by method."""
    monkeypatch.setattr(on_texts.seeds, "run", lambda *_: of_seeds)
    settings = {"reference": "FedAvg", "compare": ["loss"], "config": {"run.rounds": 3}} | settings
    return on_texts.run(settings, Options())


@pytest.mark.parametrize(("more", "word"), [(0.004, "holds here."), (0.1, "does not hold here.")])
def test_claims_are_judged_over_the_seeds_which_keep_their_values(monkeypatch, more, word):
    losses = (1.6, 1.9, 1.7, 1.8, 1.5)
    of_seeds = [{"FedAvg": measured(v), "FedRand": measured(v + more * (1 + i / 9), 5)} for i, v in enumerate(losses)]
    found = outcome(monkeypatch, of_seeds, claims=[CLAIM])
    by_name = {row["name"]: row for row in found.rows}
    assert by_name["FedAvg"]["metrics"]["loss"]["seeds"] == list(losses)
    assert by_name["FedRand"]["upload_bytes"] == 5
    assert any(said.endswith(f"the claim has it not higher (within 0.02): {word}") for said in found.verdicts)
    assert "FedRand: uploads are 0.5000 of FedAvg's bytes." in found.verdicts
    assert "5 seeds" in found.differences[-1]


def test_two_seeds_decide_no_claim(monkeypatch):
    of_seeds = [{"FedAvg": measured(v), "FedRand": measured(v)} for v in (1.5, 1.6)]
    said = outcome(monkeypatch, of_seeds, claims=[CLAIM]).verdicts
    assert any("not decided." in each for each in said)
    assert "2 seeds are too few to decide" in said[-1]


def test_a_score_that_a_seed_lacks_is_left_out():
    assert list(on_texts.figures_of([{"loss": 1.0, "client_loss": 2.0}, {"loss": 3.0}])) == ["loss"]


def test_the_learning_rate_of_least_validation_loss_is_kept_and_one_that_diverged_never():
    runs = [on_texts._Run({"learning_rate": rate}, 0, 0, 0.0) for rate in (3e-4, 1e-3, 3e-3)]
    assert on_texts.least(list(zip((1.7, 1.5, 1.6), runs, strict=True))) is runs[1]
    assert on_texts.least(list(zip((math.nan, 1.7, math.inf), runs, strict=True))) is runs[1]
    assert on_texts.least(list(zip((1.5, 1.5, 1.6), runs, strict=True))) is runs[0]


def test_each_method_runs_with_every_rate_and_is_chosen_by_validation_rows_alone(monkeypatch):
    """A rate that is best on the test rows is not taken for it."""
    asked = []

    def federate(exchange, config, table, rows, options):
        rate = config.train.learning_rate
        asked.append((exchange.name, rate, config.run.rounds))
        return on_texts._Run({"loss": -rate, "validation_loss": abs(rate - 1e-3), "rate": rate}, 1, 1, 0.0)

    table = SimpleNamespace(task=SimpleNamespace(spec={}), rows={})
    monkeypatch.setattr(on_texts, "_federate", federate)
    monkeypatch.setattr(on_texts, "_table", lambda *_: table)
    monkeypatch.setattr(on_texts, "_without_method", lambda *_: [("round 0", on_texts._Run({}, 0, 0, 0.0))])
    settings = {
        "methods": {
            "FedAvg": {"name": "fedavg"},
            "FedProx": {"name": "fedprox", "fields": "mu = 0.1", "config": {"run.rounds": 7}},
        },
        "learning_rates": [3e-4, 1e-3, 3e-3],
        "config": {"task.name": "text-generation", "train.learning-rate": 5.0, "run.rounds": 4},
    }
    found = on_texts.of_seed(settings, 0, Options())
    assert asked == [(name, rate, k) for name, k in (("fedavg", 4), ("fedprox", 7)) for rate in (3e-4, 1e-3, 3e-3)]
    assert list(found) == ["round 0", "FedAvg", "FedProx"]
    assert [found[name]["scores"]["rate"] for name in ("FedAvg", "FedProx")] == [1e-3, 1e-3]


def test_validation_rows_are_asked_for_where_rates_are_chosen():
    settings = {"data": "e2e_nlg", "config": {}}
    assert on_texts.needs(settings)[0].splits == ("train", "test")
    assert on_texts.needs(settings | {"learning_rates": [1e-3]})[0].splits == ("train", "validation", "test")


def test_a_claim_about_no_row_is_refused(monkeypatch):
    of_seeds = [{"FedAvg": measured(1.0)}] * 3
    with pytest.raises(ConfigError, match='claims: expected a row with that metric, found none of "FedRand"'):
        outcome(monkeypatch, of_seeds, claims=[CLAIM])
