"""Scores of held-out rows under every method: the first weights of a turn, against a naive twin.

And no report of a loss on rows that the site trains on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract import held_out_report
from fedveil.contract.layout import Payload
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.contract.trainer import ScoresExamples
from fedveil.errors import ConfigError, UploadRefused
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import check_upload as check_upload
from fedveil.training.held_out import ExampleSubset, HeldOutScoringTrainer, ReceivedLossFilter, split_held_out
from fedveil.wire.envelope import DecodedMessage
from tests.conftest import ToyTrainer

ROWS = [float(i) for i in range(held_out_report.LEAST_ROWS)]
METHODS = [
    name for name in strategies.list_methods() if not isinstance(strategies.create_method(name), PrivacyGuarantee)
]


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
def run(request) -> InProcessFederation:
    method = strategies.create_method(request.param)
    spec = dict(method.adapter.example_spec())
    generator = torch.Generator().manual_seed(271828)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in spec.items()}
    state = method.init(spec, weights, rng.initial_stream(0, "method init"))
    config = parse({"run.deterministic": True, "run.rounds": 3, "evaluate.held-out": 0.2})
    made: list[Scoring] = []

    def trainer_for(site, ctx):
        made.append(Scoring(spec, 3 + len(site), 0.25 * (1 + ord(site[0]) % 3)))
        return HeldOutScoringTrainer(made[-1], ROWS, lambda: 0)

    federation = InProcessFederation(
        MessageExchange(method, request.param, spec), config, trainer_for, ["a", "bb"], state
    )
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
            assert report[held_out_report.LOSS] == loss_of(trainer.started_from[0], ROWS)
            assert report[held_out_report.ROWS] == len(ROWS)
            assert held_out_report.REFUSED not in report


def test_private_parts_are_in_the_score():
    """FedPer: two sites with the same shared layers and other layers of their own have other scores."""
    method = strategies.create_method("fedper", "layers = 1")
    spec = dict(method.adapter.example_spec())
    weights = {n: torch.ones(t.shape) for n, t in spec.items()}
    state = method.init(spec, weights, rng.initial_stream(0, "m"))
    trainer_for = lambda site, ctx: HeldOutScoringTrainer(Scoring(spec, 4, 0.5 * len(site)), ROWS, lambda: 0)  # noqa: E731
    config = parse({"run.deterministic": True})
    run = InProcessFederation(MessageExchange(method, "fedper", spec), config, trainer_for, ["a", "bbb"], state)
    run.round(0)
    run.round(1)  # whose lower layers all begin with round 0's mean
    assert run.reports["a"][held_out_report.LOSS] == run.reports["bbb"][held_out_report.LOSS]
    top = method._top(spec)
    assert 0 < len(top) < len(spec)
    shared, own = run.models()["server"], {site: run.private.get(site).tensors for site in ("a", "bbb")}
    expected = {s: loss_of({n: (shared if n in top else own[s])[n] for n in spec}, ROWS) for s in own}
    run.round(2)
    assert {site: run.reports[site][held_out_report.LOSS] for site in ("a", "bbb")} == pytest.approx(expected)
    assert expected["a"] != expected["bbb"]


@pytest.mark.parametrize("code", held_out_report.REFUSALS)
def test_a_refusal_is_a_word_and_the_turn_goes_on(code):
    trainer = HeldOutScoringTrainer(Scoring({}, 4), ROWS, lambda: code)
    report = trainer.train({}).report
    assert {name: report[name] for name in held_out_report.FIELDS & set(report)} == {held_out_report.REFUSED: code}
    assert report["loss_trained"] == 0.25
    assert not trainer._trainer.scored
    assert held_out_report.find_fault(report, 1000) == ""


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_refusal(loss, monkeypatch):
    monkeypatch.setattr(Scoring, "mean_loss", lambda *_: loss)
    assert (
        HeldOutScoringTrainer(Scoring({}, 4), ROWS, lambda: 0).gradient({}).report[held_out_report.REFUSED]
        == held_out_report.NOT_FINITE
    )


def test_a_trainer_that_cannot_score_says_so():
    assert not isinstance(ToyTrainer({}), ScoresExamples)
    assert (
        HeldOutScoringTrainer(ToyTrainer({}), ROWS, lambda: 0).train({}).report[held_out_report.REFUSED]
        == held_out_report.NO_SCORE
    )


FAULTS = {
    "few": {held_out_report.LOSS: 1.0, held_out_report.ROWS: 63},
    "part of a row": {held_out_report.LOSS: 1.0, held_out_report.ROWS: 64.5},
    "many": {held_out_report.LOSS: 1.0, held_out_report.ROWS: 1001},
    "no count": {held_out_report.LOSS: 1.0},
    "no loss": {held_out_report.ROWS: 64},
    "both": {held_out_report.LOSS: 1.0, held_out_report.ROWS: 64, held_out_report.REFUSED: 1},
    "no such word": {held_out_report.REFUSED: 9},
    "half a word": {held_out_report.REFUSED: 1.5},
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_site_s_made_up_answer_is_refused_at_the_gate(what):
    with pytest.raises(UploadRefused, match="held_out.*found"):
        check_upload(DecodedMessage(Payload({}), 4, FAULTS[what]), UploadLimits(max_examples=1000))
    for good in ({}, {held_out_report.LOSS: -1.0, held_out_report.ROWS: 64.0}, {held_out_report.REFUSED: 2.0}):
        assert check_upload(DecodedMessage(Payload({}), 4, good), UploadLimits(max_examples=1000)) == 4


REFUSED = {
    "dp": {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0},
    "method": {"method.name": "dp_fpl", "task.name": "clip-prompt", "task.class-names": "a,b"},
    "secure": {"secure.enabled": True},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_claim_and_a_sum_have_no_scores_of_single_sites(what):
    config = parse({**REFUSED[what], "evaluate.held-out": 0.1})
    method = strategies.create_method(config.method.name, config.method.params)
    with pytest.raises(ConfigError, match=r"evaluate.held-out: expected 0 with .*; leave it out, and score on the"):
        check_guarantee(method, config, True)
    check_guarantee(method, parse(REFUSED[what]), True)


def test_each_row_is_on_one_side():
    split = split_held_out([f"row {i}" for i in range(6)], frozenset({4, 1}))
    assert list(split.held) == ["row 1", "row 4"]
    assert list(split.trained) == ["row 0", "row 2", "row 3", "row 5"]
    whole = split_held_out([1, 2], frozenset())
    assert (list(whole.trained), len(whole.held)) == ([1, 2], 0)


class Reporting(ToyTrainer):
    """A toy whose report has a loss of rows that it trains on."""

    def train(self, *given):
        trained = super().train(*given)
        return replace(trained, report={**trained.report, "loss_received": 7.0})

    gradient = train


@pytest.mark.parametrize("turn", ["train", "gradient"])
@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("held_out", [{}, {held_out_report.LOSS: 2.0}])
def test_no_loss_of_rows_that_are_trained_on_is_reported(turn, tells, held_out, monkeypatch):
    trainer = Reporting({}, 4)
    real = getattr(trainer, turn)
    monkeypatch.setattr(trainer, turn, lambda *given: replace(real(*given), report={**real(*given).report, **held_out}))
    report = getattr(ReceivedLossFilter(trainer, tells), turn)({}).report
    assert report.get("loss_received") == (2.0 if tells and held_out else None)
    assert report["loss_trained"] == 0.25


def test_a_training_without_a_step_reports_no_loss_under_another_name(monkeypatch):
    trainer = Reporting({}, 4)
    real = trainer.train
    no_steps = {"steps": 0.0, "loss_received": 7.0, "loss_trained": 7.0}
    monkeypatch.setattr(trainer, "train", lambda *given: replace(real(*given), report=no_steps))
    assert ReceivedLossFilter(trainer, False).train({}).report == {"steps": 0.0}


def test_a_part_of_the_rows_is_read_as_a_list_is():
    chosen = ExampleSubset([f"row {i}" for i in range(10)], [1, 4, 7, 9])
    assert len(chosen) == 4
    assert chosen[2] == "row 7"
    assert chosen[-1] == "row 9"
    assert chosen[1:3] == ["row 4", "row 7"]
    assert list(chosen) == ["row 1", "row 4", "row 7", "row 9"]
