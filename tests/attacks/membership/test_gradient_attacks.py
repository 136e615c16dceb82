"""Attacks that share row gradients give the same results as each attack alone, with fewer gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.audit.schedule import AuditStep, TimeBudget, take_steps
from fedveil.attacks.audit.scoring import AuditScorer
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates, remove_correction
from fedveil.attacks.membership.fedmia import FedMIAAttack
from fedveil.attacks.membership.gradient_attacks import SharedGradientScorer
from fedveil.attacks.membership.projection_residual import ProjectionResidualAttack
from fedveil.attacks.samples import AuditSample
from fedveil.contract.param_spec import ParamSpec
from fedveil.wire.payloads import payload_tensors
from tests.attacks.toy import Descent, Linear, points

SITES = "abc"
ATTACKS = (
    AlignmentAttack(),
    ProjectionResidualAttack(),
    FedMIAAttack(),
)  # in the order of their cost, as an audit tries them


@pytest.fixture
def run(federate):
    """Three sites of four rows each, three rounds: what the server saw, what it knows, and the rows."""

    def make(name: str, fields: str = "", fraction: float = 1.0) -> tuple[AdversaryView, AdversaryKnowledge, dict]:
        task = Linear()
        rows = {site: points(4, 30 + i) for i, site in enumerate(SITES)}
        noise = torch.Generator().manual_seed(5)
        start = {n: w + 0.2 * torch.randn(w.shape, generator=noise) for n, w in task.initial().items()}
        locals_ = {site: Descent(task, of_site, steps=3, rate=0.3) for site, of_site in rows.items()}
        federation, view = federate(
            name, task.spec, start, lambda site, _: locals_[site], fields, sites=SITES, rounds=3, fraction=fraction
        )
        federation.run()
        return view, AdversaryKnowledge(task, start), rows

    return make


METHODS = [("fedavg", ""), ("fedrand", ""), ("fedrand", "past = false"), ("random_binary", ""), ("scaffold", "")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), METHODS)
@pytest.mark.parametrize("most", [1 << 19, 5])
def test_shared_scores_are_those_of_each_attack_alone(name, fields, most, run):
    """Own rows, rows of another site and rows of nobody; with next to nothing kept as well."""
    view, knowledge, rows = run(name, fields)
    shared, alone, told_apart = SharedGradientScorer(ATTACKS, most=most), 0, 0
    for site in SITES:
        for asked in (rows["a"], rows["b"], points(5, 7)):
            for attack in ATTACKS:
                single = SharedGradientScorer([attack], others=0)
                expected = single.scores(attack, view, site, knowledge, asked)
                scores = shared.scores(attack, view, site, knowledge, asked)
                assert scores.keys() == expected.keys() == attack.scores(view, site, knowledge, asked).keys()
                for score in scores:
                    assert scores[score] == pytest.approx(expected[score], abs=1e-12)
                    told_apart += len(set(scores[score])) > 1
                alone += single.computed
            assert sum(map(len, shared._known.values())) <= most
    assert told_apart
    if most > 5:
        assert shared.computed < alone


def test_a_row_s_gradient_is_computed_once_at_each_start(run):
    """FedAvg's sites start alike: three rounds are three starts, whatever attack and site is asked about."""
    view, knowledge, rows = run("fedavg")
    shared, asked = SharedGradientScorer(ATTACKS), [*rows["a"], *rows["b"]]
    computed = []
    for attack in ATTACKS:
        for site in SITES:
            shared.scores(attack, view, site, knowledge, asked)
        computed.append(shared.computed)
    assert computed == [8, 8, 24]


def test_of_rows_that_are_known_in_part_the_others_alone_are_computed(run):
    view, knowledge, rows = run("fedavg")
    shared, attack = SharedGradientScorer(ATTACKS), ATTACKS[0]
    shared.scores(attack, view, "a", knowledge, rows["a"])
    shared.scores(attack, view, "a", knowledge, [*rows["a"], *rows["b"], rows["b"][0]])
    assert shared.computed == 8


def test_what_is_known_is_not_taken_for_other_rows_tasks_or_runs(run, tmp_path):
    view, knowledge, rows = run("fedavg")
    shared = SharedGradientScorer(ATTACKS)
    (attack, *_), equal = ATTACKS, [(x.clone(), y) for x, y in rows["a"]]
    first = shared.scores(attack, view, "a", knowledge, rows["a"])["alignment"]
    other = shared.scores(attack, view, "a", knowledge, points(4, 7))["alignment"]
    assert not np.allclose(first, other)
    assert shared.scores(attack, view, "a", knowledge, equal)["alignment"] == pytest.approx(first, abs=0)
    task = Linear()
    task.base = -task.base
    apart = AdversaryKnowledge(task, knowledge.initial)
    scores = shared.scores(attack, view, "a", apart, rows["a"])["alignment"]
    assert scores == pytest.approx(attack.scores(view, "a", apart, rows["a"])["alignment"], abs=0)
    assert not np.allclose(scores, first)


def test_without_rows_there_is_nothing_to_compute(run):
    view, knowledge, _ = run("fedrand")
    shared = SharedGradientScorer(ATTACKS)
    for attack in ATTACKS:
        assert all(len(scores) == 0 for scores in shared.scores(attack, view, "a", knowledge, []).values())
    assert shared.computed == 0


def steps_of(found: AuditScorer, view, knowledge, rows) -> list[AuditStep]:
    """Every attack on the uploads of each site: its own rows, and rows of nobody."""
    nobody = AuditSample(points(5, 7), [""] * 5)
    return [
        step
        for site in SITES
        for step in found.upload_steps(site, view, site, knowledge, AuditSample(rows[site], [""] * 4), nobody)
    ]


@pytest.mark.long
def test_an_audit_s_steps_share_gradients_and_stay_apart_in_time(run):
    """Each attack is a step of its own, at its own cost: one for which there is no time is left out."""
    view, knowledge, rows = run("fedavg")
    nobody = AuditSample(points(5, 7), [""] * 5)
    whole, alone = ({}, {})
    scorer = AuditScorer(ATTACKS, None, nobody, 0, lambda text: None, whole)
    assert take_steps(steps_of(scorer, view, knowledge, rows), TimeBudget()) == []
    assert scorer._shared.computed == 3 * (3 * 4 + 5)  # rounds times rows; separate attacks would take 27, 27 and 81
    for attack in ATTACKS:
        take_steps(
            steps_of(AuditScorer([attack], None, nobody, 0, lambda text: None, alone), view, knowledge, rows),
            TimeBudget(),
        )
    assert whole.keys() == alone.keys()
    for key, sides in whole.items():
        assert [side.tolist() for side in sides] == [pytest.approx(side.tolist(), abs=1e-12) for side in alone[key]]
    now = [0.0]

    def seconds() -> float:
        now[0] += 1  # each look at the clock takes a second
        return now[0]

    short = AuditScorer(ATTACKS, None, nobody, 0, lambda text: None)
    left = take_steps(steps_of(short, view, knowledge, rows), TimeBudget(16.0, seconds))
    assert {f.attack for f in short.done} == {"alignment", "projection of A", "projection of B"}
    assert {(step.attacks, step.on) for step in left} >= {("FedMia", site) for site in SITES}
    assert short._shared.computed == 3 * 4 + 5, "nothing of the rounds that FedMIA alone reads"


def naive(view: AdversaryView, site: str, initial) -> Iterator[ObservedClientUpdate]:
    """Every turn from the first on, each from all that came before it."""
    seen: dict[str, torch.Tensor] = {}
    for upload in view.uploads(site):
        got = payload_tensors(view.answered(upload).payload)
        sent = view.added(upload)
        known_tensors = {**initial, **got, **seen}
        start = {n: got.get(n, known_tensors[n]) if n in sent else known_tensors[n] for n in initial}
        yield ObservedClientUpdate(upload.round, start, {n: w - start[n] for n, w in sent.items()})
        if getattr(view.exchange.method, "past", True):
            seen |= sent


@pytest.mark.parametrize(
    ("name", "fields", "fraction"),
    [("fedavg", "", 1.0), ("fedrand", "", 1.0), ("fedrand", "", 0.67), ("fedrand", "past = false", 1.0)],
)
def test_a_turn_rebuilt_by_itself_is_that_of_the_whole_history(name, fields, fraction, run):
    view, knowledge, _ = run(name, fields, fraction)
    turns = ObservedClientUpdates(view, knowledge.initial)
    assert turns.sites == view.sites
    for site in turns.sites:
        expected = list(naive(view, site, knowledge.initial))
        assert turns.rounds(site) == [turn.round for turn in expected]
        for i in reversed(range(len(expected))):
            client_update = turns.at(site, i)
            assert client_update.round == expected[i].round
            assert client_update.starts_at == expected[i].starts_at
            assert client_update.moves_by == expected[i].moves_by
            assert all(torch.equal(client_update.start[n], w) for n, w in expected[i].start.items())
        assert turns.at(site, -1).round == expected[-1].round
    assert turns.rounds("nobody") == []


def test_only_what_a_turn_needs_is_decoded(run):
    """FedAvg's last turn needs its own two messages, however long the run was."""
    view, knowledge, _ = run("fedavg")
    decoded = []

    class Counted(AdversaryView):
        def _decode(self, seen):
            decoded.append((seen.round, seen.direction))
            return super()._decode(seen)

    ObservedClientUpdates(Counted(view.tap, view.exchange), knowledge.initial).at("b", -1)
    assert sorted(decoded) == [(2, "down"), (2, "up")]


def test_a_site_of_a_lower_rank_began_with_zeros_beyond_it(run):
    """HetLoRA sends it a cut pair, and it sends one."""
    view, knowledge, _ = run("hetlora", "ranks = { b = 1 }\nadapter = { rank = 3 }")
    low, whole = (ObservedClientUpdates(view, knowledge.initial).at(site, -1) for site in "ba")
    assert not low.start["m.lora_A"][1:].any()
    assert not low.moved["m.lora_B"][:, 1:].any()
    assert low.moved["m.lora_B"][:, 0].all()
    assert whole.start["m.lora_A"].all()


def test_scaffold_s_correction_is_known_and_taken_off_a_move(run):
    """c_i is the site's gradient at the broadcast that it answered last, as nothing else was ever its c_i."""
    view, knowledge, rows = run("scaffold")
    turns, task = ObservedClientUpdates(view, knowledge.initial), Linear()
    downs = [payload_tensors(view.read(part.down).payload) for part in view.participations()["b"]]
    ups = [payload_tensors(view.read(part.up).payload) for part in view.participations()["b"]]
    assert turns._control("b", 0) == {}
    for index in (2, 1):  # in reverse, so that sums of a later turn are not mistaken for those of an earlier one
        moved = turns.at("b", index).moved
        before = Descent(task, rows["b"]).gradient({n: downs[index - 1][n] for n in task.spec}).weights
        correction = {n: downs[index][f"control.{n}"] - before[n] for n in task.spec}
        plain = {n: ups[index][n] - downs[index][n] for n in task.spec}
        assert sum(float((moved[n] * correction[n]).sum()) for n in moved) == pytest.approx(0, abs=1e-6)
        assert sum(float((moved[n] * correction[n].sign()).sum()) for n in moved) == pytest.approx(0, abs=1e-6)
        for n, value in remove_correction(plain, correction).items():
            assert moved[n] == pytest.approx(value, abs=1e-5)
        assert abs(sum(float((plain[n] * correction[n]).sum()) for n in plain)) > 1e-4

    class Summed(AdversaryView):
        is_unseen = True

    whole = ObservedClientUpdates(Summed(view.tap, view.exchange), knowledge.initial).at("b", 1)
    assert all(torch.equal(whole.moved[n], ups[1][n] - downs[1][n]) for n in task.spec)  # of several sites: as it is

    class Deaf(AdversaryView):
        def participations(self):
            parts = super().participations()
            return {site: [replace(part, down=None) for part in of] for site, of in parts.items()}

    unheard = ObservedClientUpdates(Deaf(view.tap, view.exchange), knowledge.initial).at("b", 1)  # c is not known
    assert all(torch.equal(unheard.moved[n], ups[1][n] - ups[0][n]) for n in task.spec)  # from where it was last seen
    first = turns.at("b", 0)
    assert all(torch.equal(first.moved[n], ups[0][n] - downs[0][n]) for n in task.spec)  # c = c_i = 0


def test_a_site_whose_changes_add_up_beyond_fp32_is_read_all_the_same(run):
    """Each was within what a message may hold; an infinite sum would end the audit of everybody."""
    view, knowledge, _ = run("scaffold")

    class Huge(AdversaryView):
        def _decode(self, seen):
            message = super()._decode(seen)
            fields = {
                n: torch.full_like(t, 3e38) if seen.direction == "up" and n.startswith("control.") else t
                for n, t in message.payload.fields.items()
            }
            return replace(message, payload=replace(message.payload, fields=fields))

    moved = ObservedClientUpdates(Huge(view.tap, view.exchange), knowledge.initial).at("b", 2).moved
    assert all(bool(value.isfinite().all()) for value in moved.values())
    assert any(bool(value.any()) for value in moved.values())


def test_what_is_left_of_a_move_is_what_no_correction_explains():
    """By hand; a correction whose signs point as it does is one direction, and none at all takes nothing."""
    moved = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[5.0]])}
    left = remove_correction(moved, {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([[0.0]])})
    assert torch.allclose(left["a"], torch.tensor([1.0, -1.0]))
    assert torch.allclose(left["b"], torch.tensor([[5.0]]))
    left = remove_correction(moved, {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([[0.0]])})
    assert torch.allclose(left["a"], torch.zeros(2), atol=1e-6)
    assert torch.allclose(left["b"], torch.tensor([[5.0]]))
    none = remove_correction(moved, {n: torch.zeros_like(t) for n, t in moved.items()})
    assert all(torch.equal(none[n], moved[n]) for n in moved)


def test_a_run_whose_sites_train_beside_a_residual_is_left_to_other_attacks(run):
    """Its start would be wrong, and a score that tells nothing would pass for a run that leaks nothing."""
    view, knowledge, _ = run("fedavg")

    class Beside(Linear):
        @property
        def spec(self):
            return {**super().spec, "m.residual": ParamSpec((2, 2), fixed=True)}

    for attack in ATTACKS:
        assert attack.misfit(view, knowledge) == ""
        assert "with a residual" in attack.misfit(view, AdversaryKnowledge(Beside(), knowledge.initial))
