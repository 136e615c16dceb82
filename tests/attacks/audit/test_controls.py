"""Every control of every attack can fail: where the non-members are not of the members' distribution, it does.

The rows of the sites follow a rule that the base does not know, and training teaches it. Non-members follow it too, or
have drawn labels. The base tells neither side from the other, so a control before any training sees nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from fedveil.attacks.audit import controls, findings, runner
from fedveil.attacks.audit.findings import AuditReport, control_name
from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, ROUND_0, AdversaryKnowledge, AdversaryView, list_attacks
from fedveil.attacks.samples import AuditSample
from fedveil.config import parse
from fedveil.strategies import create_method
from fedveil.wire.capture import MessageCapture
from tests.attacks.toy import CLASSES, WIDTH, Descent, Linear, Point, federation

RULE = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
ROWS = 120


class Taught(Descent):
    """Scores rows, as real trainers do."""

    def mean_loss(self, weights, rows) -> float:
        self.task.put(weights)
        return float(self.task.loss_sum(self.task.collate(rows)).detach()) / len(rows)


class Task(Linear):
    def initial(self, seed=None):
        return super().initial()

    def trainer(self, rows, stream, round_=0) -> Taught:
        return Taught(self, rows)


def drawn(count: int, seed: int, ruled: bool = True, scale: float = 1.0) -> list[Point]:
    """Rows whose labels follow RULE, or are drawn apart from it; of another `scale` the base's answers differ too."""
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(count, WIDTH, generator=generator)
    labels = (RULE @ inputs.T).argmax(0) if ruled else torch.randint(CLASSES, (count,), generator=generator)
    return list(zip(inputs, labels.tolist(), strict=True))


@cache
def audited(ruled: bool = True, scale: float = 1.0, rounds: int = 8) -> AuditReport:
    """An audit of two sites under FedAvg with every installed attack; only the non-members are as the arguments say."""
    task = Task()
    rows = {site: drawn(ROWS, i) for i, site in enumerate("ab")}
    everyone = [*rows["a"][::2], *rows["b"][::2]]
    with TemporaryDirectory() as folder:
        fed = {site: Descent(task, of_site) for site, of_site in rows.items()}
        run = federation(create_method("fedavg"), "fedavg", Path(folder) / "run", fed, task.initial(), rounds)
        run.run()
        knowledge = AdversaryKnowledge(task, task.initial(), run.models()["server"])
        own = controls.control_config(parse({"run.deterministic": True}))
        by_heart = controls.train_overfitted_control(
            task, everyone[:16], own, MessageCapture(Path(folder) / "by heart"), 30
        )
        other = controls.train_control(
            task, everyone, controls.gentle_config(own), MessageCapture(Path(folder) / "other"), 0.6
        )
        members = {site: AuditSample(of_site, [""] * ROWS) for site, of_site in rows.items()}
        others = AuditSample(drawn(2 * ROWS, 50, ruled, scale), [""] * 2 * ROWS)
        return runner.run_audit(
            AdversaryView.server(run.tap, run.exchange), knowledge, members, others, by_heart, other, 0
        )


def verdicts(found: AuditReport, model: str) -> dict[str, str]:
    return {f.attack: f.verdict for f in found.findings if f.model == model}


@pytest.mark.long
def test_with_non_members_of_the_same_distribution_every_control_to_lose_holds():
    report = audited()
    lost = [f for f in report.findings if f.kind == "to lose"]
    assert {f.model for f in lost} == {ROUND_0, OTHER_ROWS, "a", "b"}
    assert {f.verdict for f in lost if f.model in findings.TO_LOSE} == {"contains"}
    asked = {f.model: f.members for f in report.findings if f.attack == "loss"}
    assert (asked[ROUND_0], asked[OTHER_ROWS]) == (2 * ROWS, ROWS)  # half of them taught it
    assert "above" not in {f.verdict for f in lost}
    assert verdicts(report, OVERFITTED)["loss"] == verdicts(report, OVERFITTED)["calibrated"] == "above"


@pytest.mark.long
def test_what_training_teaches_of_a_distribution_is_taken_for_membership_and_a_model_taught_other_rows_shows_it():
    """The issue's case: before any training nothing is seen, and base less base is 0.5 for any rows at all."""
    report = audited(ruled=False)
    assert set(verdicts(report, ROUND_0).values()) == {"contains"}
    assert verdicts(report, "server")["calibrated"] == verdicts(report, "server")["loss"] == "above"
    for attack in ("calibrated", "loss"):
        assert verdicts(report, OTHER_ROWS)[attack] == "above"
        (note,) = [n for n in report.notes if n.startswith(f"{attack}:")]
        assert "NOT usable here, because it separates examples that the model was not trained on (other rows: " in note


@pytest.mark.long
def test_every_attack_on_models_has_a_control_that_fails_on_other_non_members():
    """Of another scale: the base's own answers, entropies among them, tell them apart."""
    failed = {
        attack
        for report in (audited(ruled=False), audited(scale=0.2))
        for model in findings.TO_LOSE
        for attack, verdict in verdicts(report, model).items()
        if verdict != "contains"
    }
    assert failed >= {f.attack for f in audited().findings if f.model == "server"}
    assert "calibrated" not in verdicts(audited(), ROUND_0)


@pytest.mark.long
def test_both_controls_of_an_attack_on_uploads_fail_on_other_non_members():
    """While the rule is being learned another site's upload has it as well; later the uploads taught other rows do."""
    fair, early, late = audited(rounds=3), audited(ruled=False, rounds=3), audited(ruled=False)
    assert "above" not in {f.verdict for f in fair.findings if f.attack == control_name("alignment")}
    assert {f.verdict for f in early.findings if f.attack == control_name("alignment")} == {"above"}
    assert verdicts(fair, OTHER_ROWS)["alignment"] == "contains"
    assert verdicts(late, OTHER_ROWS)["alignment"] == "above"
    assert all(any(n.startswith("alignment: NOT usable") for n in report.notes) for report in (early, late))


@pytest.mark.long
def test_the_control_of_other_rows_ends_as_far_as_the_run_went():
    task, own = Task(), controls.gentle_config(controls.control_config(parse({"run.deterministic": True})))
    assert own.train.epochs == 1
    with TemporaryDirectory() as folder:
        little, much, most = (
            controls.train_control(task, drawn(60, 3), own, MessageCapture(Path(folder) / str(share)), share)
            for share in (0.9, 0.5, 0.0)
        )
    assert little.rounds < much.rounds < most.rounds == 16
    assert little.loss_share <= 0.9
    assert 0.3 < much.loss_share <= 0.5


def test_a_control_ends_with_the_round_that_reached_its_share():
    """Its last upload is of that round, and what it says is the loss of the model that it gives away."""
    task, own, rows = Task(), controls.control_config(parse({"run.deterministic": True})), drawn(16, 3)
    progress_lines: list[str] = []
    with TemporaryDirectory() as folder:
        done = controls.train_overfitted_control(
            task, rows, own, MessageCapture(Path(folder)), 30, progress_lines.append
        )
        uploads = list(done.view.uploads("a"))
    scores = [Taught(task, rows).mean_loss(weights, rows) for weights in (task.initial(), done.weights)]
    assert done.loss_share == pytest.approx(scores[1] / scores[0], rel=1e-5)
    assert 0 < done.loss_share <= controls.KNOWN_BY_HEART
    assert [upload.round for upload in uploads] == list(range(done.rounds))
    assert [line.split(" % of")[0].rpartition(":")[0] for line in progress_lines] == [
        f"  round {i + 1} of at most 30" for i in range(done.rounds)
    ]
    assert [line.endswith(" more") for line in progress_lines] == [True] * (done.rounds - 1) + [False]


def test_every_attack_names_its_controls():
    assert all(attack.must_win == OVERFITTED and attack.must_lose for attack in list_attacks())


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """Fewer resamples: intervals are not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "RESAMPLES", 20)
        yield
    assert np.isfinite(findings.RESAMPLES)


def test_a_control_of_a_buffered_run_has_rounds():
    """Such a run has a buffer for more uploads than the control's two sites send."""
    config = controls.control_config(
        parse({"cohort.buffer-size": 3, "cohort.max-staleness": 4, "cohort.fraction": 0.5})
    )
    plain = controls.control_config(parse({}))
    assert config.cohort == plain.cohort
    assert plain.cohort.buffer_size == 0


def test_a_control_is_undefended_whatever_the_run_was():
    noisy = {
        "dp.clip-norm": 1.0,
        "dp.noise-multiplier": 0.8,
        "dp.epsilon": 8.0,
        "secure.enabled": True,
        "aggregate.rule": "median",
    }
    config = controls.control_config(parse(noisy))
    plain = controls.control_config(parse({}))
    assert (config.dp, config.secure, config.aggregate) == (plain.dp, plain.secure, plain.aggregate) == (
        parse({}).dp, parse({}).secure, parse({}).aggregate,
    )  # fmt: skip
