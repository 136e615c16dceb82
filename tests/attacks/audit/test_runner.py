"""The text of an audit about its attacks, for hand-made findings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedveil.attacks import statistics
from fedveil.attacks.audit import findings, runner, verdict
from fedveil.attacks.audit.findings import AttackFinding, control_name
from fedveil.attacks.audit.schedule import TimeBudget
from fedveil.attacks.audit.scoring import AuditScorer
from fedveil.attacks.base import AdversaryKnowledge, ModelAttack, UploadAttack
from fedveil.attacks.samples import AuditSample

WRONG_SITE = control_name("alignment")
CONTROL = SimpleNamespace(loss_share=0.08, rounds=4)


def found(model: str, attack: str, verdict: str) -> AttackFinding:
    value = {"above": 0.8, "contains": 0.51, "below": 0.2}[verdict]
    interval = (value, value - 0.1, value + 0.1)
    return AttackFinding(model, attack, interval, interval, interval, 0.0, 30, 30, verdict, 0.01)


def note(attack: str, *given: AttackFinding) -> str:
    (control_note,) = [n for n in verdict.control_notes(given, CONTROL, None) if n.startswith(f"{attack}:")]
    return control_note


WON = found("overfitted FedAvg", "loss", "above")
LOST = found("round 0", "loss", "contains")
OTHER = found("other rows", "loss", "contains")


def test_an_attack_counts_where_its_controls_hold():
    control_note = note("loss", LOST, OTHER, WON, found("server", "loss", "contains"), found("a", "loss", "above"))
    assert control_note == (
        "loss: its controls hold (to lose: 0.510 [0.410, 0.610], 0.510 [0.410, 0.610]). "
        "Membership shows in a (0.800 [0.700, 0.900])."
    )
    assert note("loss", LOST, WON, found("server", "loss", "below")).endswith("Membership shows in none of 1 models.")


def test_what_shows_but_is_no_higher_than_a_control_to_lose_reaches_is_counted_apart():
    """An interval of [0.41, 0.61] where nobody trained on the rows leaves 0.60 to the rows themselves."""
    weak = replace(found("b", "loss", "above"), auroc=(0.6, 0.52, 0.68))
    strong = found("a", "loss", "above")
    control_note = note("loss", LOST, WON, strong, weak)
    assert (
        "Membership shows in a (0.800 [0.700, 0.900]), b (0.600 [0.520, 0.680]; no higher than its controls"
        in control_note
    )
    verdict_text = verdict.audit_verdict([LOST, WON, strong, weak])
    assert verdict_text.startswith(
        "Membership shows in 2 of 2 findings of 1 attack whose controls hold, 1 of them no higher"
    )
    assert "no higher" not in verdict.audit_verdict([LOST, WON, strong])


@pytest.mark.parametrize("verdict", ["contains", "below"])
def test_an_attack_that_does_not_win_undefended_is_unusable(verdict):
    control_note = note("loss", LOST, found("overfitted FedAvg", "loss", verdict), found("server", "loss", "contains"))
    assert "NOT usable here, because it does not win where members are memorized" in control_note


@pytest.mark.parametrize("verdict", ["above", "below"])
@pytest.mark.parametrize("model", ["round 0", "other rows"])
def test_an_attack_that_tells_rows_apart_that_nobody_trained_on_is_unusable(model, verdict):
    given = {f.model: f for f in (LOST, OTHER)} | {model: found(model, "loss", verdict)}
    control_note = note("loss", *given.values(), WON, found("server", "loss", "above"))
    assert (
        f"NOT usable here, because it separates examples that the model was not trained on ({model}: " in control_note
    )


def test_without_controls_an_attack_is_unusable():
    control_note = note("loss", found("server", "loss", "above"))
    assert "not tried" in control_note
    assert "no control that could fail was tried" in control_note


def test_a_control_on_which_all_rows_score_the_same_is_none():
    same = (0.5, 0.5, 0.5)
    empty = replace(LOST, auroc=same)
    assert "NOT usable here, because it separates" in note("loss", empty, WON, found("server", "loss", "above"))
    assert "its controls hold (to lose: 0.510" in note("loss", empty, OTHER, WON, found("server", "loss", "above"))
    apart = replace(LOST, auroc=(1.0, 1.0, 1.0), verdict="above")
    assert "round 0: 1.000 [1.000, 1.000]" in note("loss", apart, WON, found("server", "loss", "above"))


def test_an_attack_that_scores_all_rows_of_a_model_alike_says_nothing_of_it():
    """It is no finding that nothing shows, whatever its controls say."""
    blind = replace(found("b", "loss", "contains"), auroc=(0.5, 0.5, 0.5))
    seen = found("a", "loss", "contains")
    assert verdict.strongest_findings([LOST, WON, blind, seen]) == [seen]
    assert verdict.audit_verdict([LOST, WON, blind]).startswith(
        "Not decided: no attack whose controls hold was tried on the run"
    )
    notes = verdict.control_notes([LOST, WON, blind, seen], CONTROL, None)
    assert "loss: it scores all examples alike on b, so it says NOTHING about them." in notes
    assert any(text.endswith("Membership shows in none of 1 models.") for text in notes)
    made = collector(_Site())
    made.kinds["loss"] = "uploads"
    targets = [("uploads", "a"), ("uploads", "b")]
    assert made.undecided([LOST, WON, blind, seen], targets) == [
        "b: no attack on its uploads whose controls hold was tried"
    ]


def test_the_control_of_other_rows_is_told_of():
    assert "There is NO control of other rows" in verdict.control_notes([], CONTROL, None)[1]
    taught = SimpleNamespace(loss_share=0.61, rounds=3, members=range(40))
    assert (
        "was trained on 40 of the members to 61 % of their loss (epochs: 3)"
        in verdict.control_notes([], CONTROL, taught)[1]
    )


def test_the_alignment_loses_on_wrong_sites_unless_it_wins_on_one():
    won = found("overfitted FedAvg", "alignment", "above")
    wrong = [found(f"s{i}", WRONG_SITE, "contains") for i in range(3)] + [found("s3", WRONG_SITE, "below")]
    seen = found("s0", "alignment", "above")
    assert "its controls hold" in note("alignment", won, seen, *wrong)
    assert "NOT usable" in note("alignment", won, seen, *wrong[:3], found("s3", WRONG_SITE, "above"))
    assert not [n for n in verdict.control_notes([won, seen, *wrong], CONTROL, None) if n.startswith(WRONG_SITE)]


def given(model: str, attack: str, p: float) -> AttackFinding:
    return replace(found(model, attack, "above"), p=p)


def test_a_verdict_is_corrected_for_the_others_of_its_kind():
    """Twenty findings about the run, one of them with p = 0.01; a control of p = 0.03 beside one of p = 0.9."""
    run = [given(f"s{i}", "loss", 0.01 if i == 0 else 0.9) for i in range(20)]
    lose = [given("round 0", "loss", 0.03), given("s0", WRONG_SITE, 0.9)]
    win = [given("overfitted FedAvg", "loss", 0.03)]
    done = findings.correct_for_multiple_tests([*run, *lose, *win])
    assert [f.verdict for f in done] == [*["contains"] * 20, "contains", "contains", "above"]
    assert [f.p for f in done[:2]] + [f.p for f in done[20:]] == pytest.approx([0.2, 1.0, 0.06, 0.9, 0.03])
    assert findings.correct_for_multiple_tests(run[:5])[0].verdict == "above"
    assert findings.correct_for_multiple_tests([replace(run[0], verdict="below")])[0].verdict == "below"
    assert findings.correct_for_multiple_tests([]) == []


@pytest.mark.long
def test_of_runs_that_give_nothing_away_fewer_than_one_audit_in_twenty_finds_membership():
    """Nine models times six attacks, the attacks as alike as real ones. At 5 % each, 2.7 of them would be false."""
    rng, num_false_alarms, alone = np.random.default_rng(6), 0, 0
    for _ in range(150):
        found_ = []
        for model in range(9):
            rows = rng.normal(size=80)
            for attack in range(6):
                scores = rows + 0.7 * rng.normal(size=80)
                z = statistics.rank_test(scores[:40], scores[40:])
                p = statistics.two_sided(z)
                found_.append(replace(given(f"s{model}", f"attack {attack}", p), verdict="above" if z > 0 else "below"))
        alone += sum(f.p <= 0.05 for f in found_)
        num_false_alarms += any(f.verdict != "contains" for f in findings.correct_for_multiple_tests(found_))
    assert alone / 150 == pytest.approx(2.7, abs=0.6)
    assert num_false_alarms / 150 < 0.05


def test_a_finding_has_the_statistics_of_its_scores():
    rng = np.random.default_rng(3)
    f = findings.make_finding("server", "loss", rng.normal(2.0, 1.0, 200), rng.normal(0.0, 1.0, 200), 0)
    assert (f.members, f.non_members, f.verdict) == (200, 200, "above")
    assert f.auroc[1] < f.auroc[0] < f.auroc[2]
    assert f.auroc[0] == pytest.approx(0.92, abs=0.04)  # Phi(2 / sqrt 2)
    assert f.tpr_at_1[0] > f.tpr_at_01[0]
    assert f.epsilon_bound > 0.5
    assert f.p < 1e-9
    assert findings.make_finding("server", "loss", np.arange(30.0), np.arange(30.0), 0, z=-3.0).verdict == "below"


def test_a_sample_keeps_rows_with_the_labels_of_another():
    sample = AuditSample([1, 2, 3, 4], ["x", "y", "x", "z"])
    assert sample.alike(["x", "z"], 2) == AuditSample([1, 3], ["x", "x"])
    assert sample.alike(["q"], 5).rows == []


class _OnModels(ModelAttack):
    names = ("loss",)

    def score(self, answer):
        raise AssertionError("the public base below answers")


class _OnlyOtherRows(_OnModels):
    names = ("fall",)
    must_lose = ("other rows",)


class _OnUploads(UploadAttack):
    def scores(self, view, site, knowledge, rows):
        return {"alignment": np.arange(float(len(rows)))}


class _OnChanges(UploadAttack):
    reads = frozenset({"changes"})

    def scores(self, view, site, knowledge, rows):
        return {"change": np.arange(float(len(rows)))}


class _Base:
    """In place of the public base: scores of each row without a model."""

    def __init__(self, *_) -> None: ...

    def scores(self, attacks, task, weights, rows):
        assert {type(attack) for attack in attacks} <= {_OnModels, _OnlyOtherRows}
        return {name: np.arange(float(len(rows))) for attack in attacks for name in attack.names}


def audited(sends: str, monkeypatch, *more, sums=None) -> tuple[set[tuple[str, str]], findings.AuditReport]:
    """(attack, model) of every finding of two sites that send such uploads, and the audit."""
    monkeypatch.setattr(runner, "list_attacks", lambda: [_OnModels(), _OnUploads(), *more])
    monkeypatch.setattr(runner, "PublicBaseScores", _Base)
    rebuilt = SimpleNamespace(coverage=1.0, staleness=0, weights={})
    monkeypatch.setattr(runner.factor_pairing, "latest_factors", lambda *_: rebuilt)
    monkeypatch.setattr(runner.factor_pairing, "merge_with_broadcast", lambda *_: rebuilt)
    view, plain = (SimpleNamespace(exchange=exchange_of(s)) for s in (sends, "weights"))
    knowledge = SimpleNamespace(task=None, initial={}, server={})
    control = SimpleNamespace(task=None, weights={}, members=[1, 2, 3], view=plain, loss_share=0.1, rounds=4)
    taught = SimpleNamespace(task=None, weights={}, members=[], view=plain, loss_share=0.5, rounds=2)
    sample = AuditSample([1, 2, 3], [""] * 3)
    result = runner.run_audit(view, knowledge, {"a": sample, "b": sample}, sample, control, taught, 0, sums=sums)
    return {(f.attack, f.model) for f in result.findings}, result


def exchange_of(sends: str) -> SimpleNamespace:
    return SimpleNamespace(method=SimpleNamespace(upload_kind=sends))


CONTROLS = {
    ("loss", "round 0"),
    *((attack, model) for attack in ("loss", "alignment") for model in ("other rows", "overfitted FedAvg")),
}
BY_UPLOAD = {(attack, site) for attack in ("alignment", WRONG_SITE) for site in "ab"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("sends", "attacked", "said"),
    [
        ("weights", BY_UPLOAD | {("loss", "a"), ("loss", "b")}, ""),
        ("gradients", BY_UPLOAD, "The sites send gradients"),
        ("changes", set(), "uploads are NOT attacked"),
    ],
)
def test_what_uploads_are_decides_how_sites_are_attacked(sends, attacked, said, monkeypatch):
    attack_model_pairs, result = audited(sends, monkeypatch)
    controls_ = CONTROLS if attacked else {(attack, model) for attack, model in CONTROLS if attack == "loss"}
    assert attack_model_pairs == controls_ | {("loss", "server")} | attacked
    assert said in " ".join(result.notes)
    left = "Left out: _OnUploads: it reads gradients and weights, and the sites of this run send changes."
    assert (left in result.notes) == (not attacked)
    assert bool(result.rebuilt) == (sends == "weights")


def test_an_attack_says_which_uploads_it_reads(monkeypatch):
    """The overfitted control sends weights, so there is none for an attack on changes: it stays unusable."""
    attack_model_pairs, result = audited("changes", monkeypatch, _OnChanges())
    assert attack_model_pairs >= {("change", "a"), ("change, wrong site", "a")}
    assert not [f for f in attack_model_pairs if f[0] == "alignment" and f[1] in "ab"]
    assert "NOT attacked" not in " ".join(result.notes)
    assert any(n.startswith("change: NOT usable here, because it does not win") for n in result.notes)


@pytest.mark.long
def test_an_attack_stands_beside_the_controls_that_it_names(monkeypatch):
    found_, _ = audited("weights", monkeypatch, _OnlyOtherRows())
    controls_ = {"round 0", "other rows", "overfitted FedAvg"}
    assert {model for attack, model in found_ if attack == "fall"} & controls_ == controls_ - {"round 0"}
    assert {model for attack, model in found_ if attack == "loss"} >= controls_


def test_an_audit_without_the_final_model_is_refused():
    with pytest.raises(ValueError, match="knowledge.server: the server's final model is missing"):
        runner.run_audit(None, AdversaryKnowledge(None, {}), {}, AuditSample([], []), CONTROL, None, 0)


@pytest.mark.long
def test_the_sum_of_a_secure_run_is_attacked_as_if_it_were_each_site_s_upload(monkeypatch):
    plain, _ = audited("weights", monkeypatch)
    attack_model_pairs, result = audited("weights", monkeypatch, sums=SimpleNamespace(exchange=exchange_of("weights")))
    assert attack_model_pairs - plain == {
        (attack, f"{site}, the sum") for attack in ("alignment", "loss") for site in "ab"
    }
    assert "loss: NOT usable here" in " ".join(result.notes)  # as without it: the controls are those of the run


class _Site(UploadAttack):
    """Scores that tell by which site's upload a row was asked about."""

    def scores(self, view, site, knowledge, rows):
        ASKED.append((site, tuple(rows)))
        return {"site": np.full(len(rows), {"a": 0.0, "b": 1.0}[site])}


ASKED: list[tuple[str, tuple[int, ...]]] = []


def collector(attack) -> AuditScorer:
    return AuditScorer([attack], None, AuditSample([7, 8, 9], [""] * 3), 0, lambda text: None)


def test_rows_of_no_site_are_asked_once_about_each_site_s_upload():
    ASKED.clear()
    scorer, view = collector(_Site()), SimpleNamespace(exchange=exchange_of("weights"))
    mine, rest = AuditSample([1, 2], ["", ""]), AuditSample([7, 8, 9], [""] * 3)
    for site, is_control in (("a", False), ("b", True), ("a", True)):
        for step in scorer.upload_steps("a", view, site, None, mine, rest, is_control):
            step.take()
    assert ASKED == [("a", (1, 2)), ("a", (7, 8, 9)), ("b", (1, 2)), ("b", (7, 8, 9)), ("a", (1, 2))]
    assert {f.auroc for f in scorer.done} == {(0.5, 0.5, 0.5)}  # both sides asked about the same upload
    (step,) = scorer.upload_steps("a", SimpleNamespace(exchange=exchange_of("weights")), "a", None, mine, rest)
    step.take()
    assert ASKED[-1] == ("a", (7, 8, 9))  # another run's upload


def test_findings_about_controls_that_are_known_are_not_made_again(monkeypatch):
    known = [found("overfitted FedAvg", "alignment", "above")]
    view, sample = SimpleNamespace(exchange=exchange_of("gradients")), AuditSample([1, 2, 3], [""] * 3)
    monkeypatch.setattr(runner, "PublicBaseScores", _Base)
    knowledge = SimpleNamespace(task=None, initial={}, server={})
    result = runner.run_audit(
        view, knowledge, {"a": sample}, sample, CONTROL, None, 0, attacks=[_OnUploads()], known=known
    )
    assert [(f.model, f.attack) for f in result.findings] == [("overfitted FedAvg", "alignment"), ("a", "alignment")]
    assert known == [found("overfitted FedAvg", "alignment", "above")]


def clocked(monkeypatch, seconds: float, *more) -> tuple[set[tuple[str, str]], findings.AuditReport]:
    """An audit in which each pass over rows takes a second."""
    now = [0.0]

    class Slow(_OnUploads):
        cost = 5

        def scores(self, view, site, knowledge, rows):
            now[0] += 1
            return {"slow": np.arange(float(len(rows)))}

    budget = TimeBudget(seconds, lambda: now[0])
    monkeypatch.setattr(runner, "TimeBudget", lambda: budget)
    return audited("weights", monkeypatch, Slow(), *more)


@pytest.mark.long
def test_what_does_not_fit_into_the_time_is_left_out_and_named(monkeypatch):
    """Two controls take 4 of the 9 s, a's upload 2, a's on the wrong site 1 or 2; the next would take as long again."""
    found_, result = clocked(monkeypatch, 7.0)
    assert found_ >= CONTROLS | {("loss", "server"), ("alignment", "b")}, "cheaper attacks come first"
    assert ("slow", "a") in found_
    assert ("slow", "b") not in found_
    (named,) = [n for n in result.notes if n.startswith("Left out: Slow on ")]
    assert " b" in named
    assert "--minutes" in named
    assert not [n for n in clocked(monkeypatch, 99.0)[1].notes if n.startswith("Left out")]


@pytest.mark.long
def test_an_attack_whose_controls_do_not_fit_is_not_tried_on_the_run(monkeypatch):
    found_, _ = clocked(monkeypatch, 1.0)
    assert not {model for attack, model in found_ if attack == "slow"} & {"a", "b"}


@pytest.mark.long
def test_an_audit_says_of_what_it_could_not_tell_anything(monkeypatch):
    """The scores of these attacks are equal on both sides, so that no control is won."""
    _, result = audited("weights", monkeypatch)
    assert [text.partition(":")[0] for text in result.undecided] == ["server", "a", "a", "b", "b"]
    audit_findings = [
        found("overfitted FedAvg", "loss", "above"),
        LOST,
        *(found(m, "loss", "above") for m in ("server", "a")),
    ]
    collector_ = collector(_OnModels())
    collector_.kinds["loss"] = "model"
    asked = [("model", "server"), ("model", "a"), ("uploads", "a"), ("model", "b")]
    assert collector_.undecided(audit_findings, asked) == [
        "a: no attack on its uploads whose controls hold was tried",
        "b: no attack on its model whose controls hold was tried",
    ]
    assert len(collector_.undecided([replace(audit_findings[0], verdict="contains"), *audit_findings[1:]], asked)) == 4
