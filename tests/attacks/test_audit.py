"""What an audit says of its attacks, from hand-made findings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedveil.attacks import audit, findings
from fedveil.attacks.base import Knowledge, ModelAttack, UploadAttack
from fedveil.attacks.findings import Finding, beside
from fedveil.attacks.samples import Sample

WRONG_SITE = beside("alignment")
CONTROL = SimpleNamespace(loss_share=0.08, rounds=4)


def found(model: str, attack: str, verdict: str) -> Finding:
    value = {"above": 0.8, "contains": 0.5, "below": 0.2}[verdict]
    interval = (value, value - 0.1, value + 0.1)
    return Finding(model, attack, interval, interval, interval, 0.0, 30, 30, verdict)


def note(attack: str, *given: Finding) -> str:
    (said,) = [n for n in findings.notes(given, CONTROL) if n.startswith(f"{attack}:")]
    return said


WON = found("overfitted FedAvg", "loss", "above")
LOST = found("round 0", "loss", "contains")


def test_an_attack_counts_where_both_controls_hold():
    said = note("loss", LOST, WON, found("server", "loss", "contains"), found("a", "loss", "above"))
    assert said == "loss: both controls hold. Membership shows in a (0.800 [0.700, 0.900])."
    assert note("loss", LOST, WON, found("server", "loss", "below")).endswith("Membership shows in none of 1 models.")


@pytest.mark.parametrize("verdict", ["contains", "below"])
def test_an_attack_that_does_not_win_undefended_is_unusable(verdict):
    said = note("loss", LOST, found("overfitted FedAvg", "loss", verdict), found("server", "loss", "contains"))
    assert "NOT usable here, for it does not win where members are known by heart" in said


@pytest.mark.parametrize("verdict", ["above", "below"])
def test_an_attack_that_tells_untrained_rows_apart_is_unusable(verdict):
    said = note("loss", found("round 0", "loss", verdict), WON, found("server", "loss", "above"))
    assert "NOT usable here, for it tells rows apart that nobody trained on there" in said


def test_without_controls_an_attack_is_unusable():
    assert "not tried" in note("loss", found("server", "loss", "above"))


def test_the_alignment_loses_on_wrong_sites_unless_it_wins_on_more_than_one_in_four():
    won = found("overfitted FedAvg", "alignment", "above")
    wrong = [found(f"s{i}", WRONG_SITE, "contains") for i in range(3)] + [found("s3", WRONG_SITE, "below")]
    seen = found("s0", "alignment", "above")
    assert "both controls hold. Membership shows in s0" in note("alignment", won, seen, *wrong)
    one = [*wrong[:3], found("s3", WRONG_SITE, "above")]
    assert "both controls hold" in note("alignment", won, seen, *one)
    two = [*wrong[:2], found("s2", WRONG_SITE, "above"), found("s3", WRONG_SITE, "above")]
    assert "NOT usable" in note("alignment", won, seen, *two)
    assert not [n for n in findings.notes([won, seen, *wrong], CONTROL) if n.startswith(WRONG_SITE)]


def test_a_finding_has_the_statistics_of_its_scores():
    rng = np.random.default_rng(3)
    f = findings.finding("server", "loss", rng.normal(2.0, 1.0, 200), rng.normal(0.0, 1.0, 200), 0)
    assert (f.members, f.non_members, f.verdict) == (200, 200, "above")
    assert f.auroc[1] < f.auroc[0] < f.auroc[2]
    assert f.auroc[0] == pytest.approx(0.92, abs=0.04)  # Phi(2 / sqrt 2)
    assert f.tpr_at_1[0] > f.tpr_at_01[0]
    assert f.epsilon_bound > 0.5


def test_a_sample_keeps_rows_with_the_labels_of_another():
    sample = Sample([1, 2, 3, 4], ["x", "y", "x", "z"])
    assert sample.alike(["x", "z"], 2) == Sample([1, 3], ["x", "x"])
    assert sample.alike(["q"], 5).rows == []


class _OnModels(ModelAttack):
    def score(self, answer):
        raise AssertionError("the public base below answers")


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
        assert [type(attack) for attack in attacks] == [_OnModels]
        return {"loss": np.arange(float(len(rows)))}


def audited(sends: str, monkeypatch, *more, sums=None) -> tuple[set[tuple[str, str]], findings.Audit]:
    """(attack, model) of every finding of two sites that send such uploads, and the audit."""
    monkeypatch.setattr(audit, "installed", lambda: [_OnModels(), _OnUploads(), *more])
    monkeypatch.setattr(audit, "PublicBase", _Base)
    rebuilt = SimpleNamespace(coverage=1.0, staleness=0, weights={})
    monkeypatch.setattr(audit.factor_pairing, "latest", lambda *_: rebuilt)
    monkeypatch.setattr(audit.factor_pairing, "merged", lambda *_: rebuilt)
    view, plain = (SimpleNamespace(exchange=exchange_of(s)) for s in (sends, "weights"))
    knowledge = SimpleNamespace(task=None, initial={}, server={})
    control = SimpleNamespace(task=None, weights={}, members=[1, 2, 3], view=plain, loss_share=0.1, rounds=4)
    sample = Sample([1, 2, 3], [""] * 3)
    result = audit.audit(view, knowledge, {"a": sample, "b": sample}, sample, control, 0, sums=sums)
    return {(f.attack, f.model) for f in result.findings}, result


def exchange_of(sends: str) -> SimpleNamespace:
    return SimpleNamespace(method=SimpleNamespace(sends=sends))


CONTROLS = {("loss", "round 0"), ("loss", "overfitted FedAvg"), ("alignment", "overfitted FedAvg")}
BY_UPLOAD = {(attack, site) for attack in ("alignment", WRONG_SITE) for site in "ab"}


@pytest.mark.parametrize(
    ("sends", "attacked", "said"),
    [
        ("weights", BY_UPLOAD | {("loss", "a"), ("loss", "b")}, ""),
        ("gradients", BY_UPLOAD, "Sites send gradients"),
        ("changes", set(), "uploads are NOT attacked"),
    ],
)
def test_what_uploads_are_decides_how_sites_are_attacked(sends, attacked, said, monkeypatch):
    found, result = audited(sends, monkeypatch)
    assert found == CONTROLS | {("loss", "server")} | attacked
    assert said in " ".join(result.notes)
    assert bool(result.rebuilt) == (sends == "weights")


def test_an_attack_says_which_uploads_it_reads(monkeypatch):
    """The overfitted control sends weights, so there is none for an attack on changes: it stays unusable."""
    found, result = audited("changes", monkeypatch, _OnChanges())
    assert found >= {("change", "a"), ("change, wrong site", "a")}
    assert not [f for f in found if f[0] == "alignment" and f[1] in "ab"]
    assert "NOT attacked" not in " ".join(result.notes)
    assert any(n.startswith("change: NOT usable here, for it does not win") for n in result.notes)


def test_an_audit_without_the_final_model_is_refused():
    with pytest.raises(ValueError, match="knowledge.server: expected the server's final model"):
        audit.audit(None, Knowledge(None, {}), {}, Sample([], []), CONTROL, 0)


def test_the_sum_of_a_secure_run_is_attacked_as_if_it_were_each_site_s_upload(monkeypatch):
    plain, _ = audited("weights", monkeypatch)
    found, result = audited("weights", monkeypatch, sums=SimpleNamespace(exchange=exchange_of("weights")))
    assert found - plain == {(attack, f"{site}, the sum") for attack in ("alignment", "loss") for site in "ab"}
    assert "loss: NOT usable here" in " ".join(result.notes)  # as without it: the controls are those of the run
