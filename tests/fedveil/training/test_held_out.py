"""Scores of held-out rows under every method: the first weights of a turn, against a naive twin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract import held_out
from fedveil.contract.budget import Claim
from fedveil.contract.layout import Payload
from fedveil.contract.trainer import ScoresRows
from fedveil.errors import ConfigError, UploadRefused
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.privacy.claims import checked_claim
from fedveil.server_app.intake import Limits
from fedveil.server_app.intake import check as check_upload
from fedveil.training.held_out import Scored
from fedveil.wire.envelope import Message
from tests.conftest import ToyTrainer

ROWS = [float(i) for i in range(held_out.LEAST_ROWS)]
METHODS = [name for name in strategies.names() if not isinstance(strategies.create(name), Claim)]


def loss_of(weights, rows) -> float:
    """Of entries and rows together, so that every tensor and every row shows."""
    entries = sum(float(w.double().sum()) * (1 + len(name)) for name, w in sorted(weights.items()))
    return sum(abs(entries - row) for row in rows) / len(rows)


@dataclass
class Scoring(ToyTrainer):
    """A toy that can score, and counts it."""

    scored: list[float] = field(default_factory=list)

    def mean_loss(self, weights, rows):
        self.scored.append(loss_of(weights, rows))
        return self.scored[-1]


@pytest.fixture(params=METHODS)
def run(request) -> Federation:
    method = strategies.create(request.param)
    spec = dict(method.adapter.example_spec())
    generator = torch.Generator().manual_seed(271828)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in spec.items()}
    state = method.init(spec, weights, rng.initial(0, "method init"))
    config = parse({"run.deterministic": True, "run.rounds": 3, "evaluate.held-out": 0.2})
    made: list[Scoring] = []

    def trainer_for(site, ctx):
        made.append(Scoring(spec, 3 + len(site), 0.25 * (1 + ord(site[0]) % 3)))
        return Scored(made[-1], ROWS, lambda: 0)

    federation = Federation(Exchange(method, request.param, spec), config, trainer_for, ["a", "bb"], state)
    federation.made = made
    return federation


def test_every_method_is_scored_on_what_it_is_about_to_train_from(run):
    """Among it what the site keeps for itself: the twin takes what the trainer was given, in every round."""
    for round_ in range(3):
        run.made.clear()
        run.round(round_)
        for site, trainer in zip(run.last_cohort, run.made, strict=True):
            assert len(trainer.scored) == 1
            report = run.reports[site]
            assert report[held_out.LOSS] == loss_of(trainer.started_from[0], ROWS)
            assert report[held_out.ROWS] == len(ROWS)
            assert held_out.REFUSED not in report


def test_private_parts_are_in_the_score():
    """FedPer: two sites with the same shared layers and other layers of their own have other scores."""
    method = strategies.create("fedper", "layers = 1")
    spec = dict(method.adapter.example_spec())
    weights = {n: torch.ones(t.shape) for n, t in spec.items()}
    state = method.init(spec, weights, rng.initial(0, "m"))
    trainer_for = lambda site, ctx: Scored(Scoring(spec, 4, 0.5 * len(site)), ROWS, lambda: 0)  # noqa: E731
    config = parse({"run.deterministic": True})
    run = Federation(Exchange(method, "fedper", spec), config, trainer_for, ["a", "bbb"], state)
    run.round(0)
    run.round(1)  # whose lower layers all begin with round 0's mean
    assert run.reports["a"][held_out.LOSS] == run.reports["bbb"][held_out.LOSS]
    top = method._top(spec)
    assert 0 < len(top) < len(spec)
    shared, own = run.deployed()["server"], {site: run.private.get(site).tensors for site in ("a", "bbb")}
    expected = {s: loss_of({n: (shared if n in top else own[s])[n] for n in spec}, ROWS) for s in own}
    run.round(2)
    assert {site: run.reports[site][held_out.LOSS] for site in ("a", "bbb")} == pytest.approx(expected)
    assert expected["a"] != expected["bbb"]


@pytest.mark.parametrize("code", held_out.REFUSALS)
def test_a_refusal_is_a_word_and_the_turn_goes_on(code):
    trainer = Scored(Scoring({}, 4), ROWS, lambda: code)
    report = trainer.train({}).report
    assert {name: report[name] for name in held_out.FIELDS & set(report)} == {held_out.REFUSED: code}
    assert report["loss_trained"] == 0.25
    assert not trainer._trainer.scored
    assert held_out.fault(report, 1000) == ""


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_refusal(loss, monkeypatch):
    monkeypatch.setattr(Scoring, "mean_loss", lambda *_: loss)
    assert Scored(Scoring({}, 4), ROWS, lambda: 0).gradient({}).report[held_out.REFUSED] == held_out.NOT_FINITE


def test_a_trainer_that_cannot_score_says_so():
    assert not isinstance(ToyTrainer({}), ScoresRows)
    assert Scored(ToyTrainer({}), ROWS, lambda: 0).train({}).report[held_out.REFUSED] == held_out.NO_SCORE


FAULTS = {
    "few": {held_out.LOSS: 1.0, held_out.ROWS: 63},
    "part of a row": {held_out.LOSS: 1.0, held_out.ROWS: 64.5},
    "many": {held_out.LOSS: 1.0, held_out.ROWS: 1001},
    "no count": {held_out.LOSS: 1.0},
    "no loss": {held_out.ROWS: 64},
    "both": {held_out.LOSS: 1.0, held_out.ROWS: 64, held_out.REFUSED: 1},
    "no such word": {held_out.REFUSED: 9},
    "half a word": {held_out.REFUSED: 1.5},
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_site_s_made_up_answer_is_refused_at_the_gate(what):
    with pytest.raises(UploadRefused, match="held_out.*expected .*found"):
        check_upload(Message(Payload({}), 4, FAULTS[what]), Limits(max_examples=1000))
    for good in ({}, {held_out.LOSS: -1.0, held_out.ROWS: 64.0}, {held_out.REFUSED: 2.0}):
        assert check_upload(Message(Payload({}), 4, good), Limits(max_examples=1000)) == 4


REFUSED = {
    "dp": {"dp.clip": 1.0, "dp.noise": 1.0},
    "method": {"method.name": "dp_fpl", "task.name": "clip-prompt"},
    "secure": {"secure.enabled": True},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_claim_and_a_sum_have_no_scores_of_single_sites(what):
    config = parse({**REFUSED[what], "evaluate.held-out": 0.1})
    method = strategies.create(config.method.name, config.method.fields)
    with pytest.raises(ConfigError, match=r"evaluate.held-out: expected 0 with .*; leave it out, and score on the"):
        checked_claim(method, config, True)
    checked_claim(method, parse(REFUSED[what]), True)
