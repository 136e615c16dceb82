"""Attacks that share the gradients of rows say what each says alone, for fewer gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.collector import Collector
from fedveil.attacks.membership.alignment import Alignment
from fedveil.attacks.membership.fedmia import FedMia
from fedveil.attacks.membership.projection import Projection
from fedveil.attacks.membership.row_gradients import Shared
from fedveil.attacks.membership.turns import Turn, Turns, without
from fedveil.attacks.samples import Sample
from fedveil.attacks.steps import Budget, Step, taken
from fedveil.contract.spec import TensorSpec
from fedveil.wire.payloads import tensors_of
from tests.attacks.toy import Descent, Linear, points

SITES = "abc"
ATTACKS = (Alignment(), Projection(), FedMia())  # in the order of their cost, as an audit tries them


@pytest.fixture
def run(federate):
    """Three sites of four rows each, three rounds: what the server saw, what it knows, and the rows."""

    def make(name: str, fields: str = "", fraction: float = 1.0) -> tuple[View, Knowledge, dict]:
        task = Linear()
        rows = {site: points(4, 30 + i) for i, site in enumerate(SITES)}
        noise = torch.Generator().manual_seed(5)
        start = {n: w + 0.2 * torch.randn(w.shape, generator=noise) for n, w in task.initial().items()}
        locals_ = {site: Descent(task, of_site, steps=3, rate=0.3) for site, of_site in rows.items()}
        federation, view = federate(
            name, task.spec, start, lambda site, _: locals_[site], fields, sites=SITES, rounds=3, fraction=fraction
        )
        federation.run()
        return view, Knowledge(task, start), rows

    return make


METHODS = [("fedavg", ""), ("fedrand", ""), ("fedrand", "past = false"), ("random_binary", ""), ("scaffold", "")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), METHODS)
@pytest.mark.parametrize("most", [1 << 19, 5])
def test_shared_scores_are_those_of_each_attack_alone(name, fields, most, run):
    """Own rows, rows of another site and rows of nobody; with next to nothing kept as well."""
    view, knowledge, rows = run(name, fields)
    shared, alone, told_apart = Shared(ATTACKS, most=most), 0, 0
    for site in SITES:
        for asked in (rows["a"], rows["b"], points(5, 7)):
            for attack in ATTACKS:
                single = Shared([attack], others=0)
                expected = single.scores(attack, view, site, knowledge, asked)
                found = shared.scores(attack, view, site, knowledge, asked)
                assert found.keys() == expected.keys() == attack.scores(view, site, knowledge, asked).keys()
                for score in found:
                    assert found[score] == pytest.approx(expected[score], abs=1e-12)
                    told_apart += len(set(found[score])) > 1
                alone += single.computed
            assert sum(map(len, shared._known.values())) <= most
    assert told_apart
    if most > 5:
        assert shared.computed < alone


def test_a_row_s_gradient_is_computed_once_at_each_start(run):
    """FedAvg's sites start alike: three rounds are three starts, whatever attack and site is asked about."""
    view, knowledge, rows = run("fedavg")
    shared, asked = Shared(ATTACKS), [*rows["a"], *rows["b"]]
    computed = []
    for attack in ATTACKS:
        for site in SITES:
            shared.scores(attack, view, site, knowledge, asked)
        computed.append(shared.computed)
    assert computed == [8, 8, 24]


def test_of_rows_that_are_known_in_part_the_others_alone_are_computed(run):
    view, knowledge, rows = run("fedavg")
    shared, attack = Shared(ATTACKS), ATTACKS[0]
    shared.scores(attack, view, "a", knowledge, rows["a"])
    shared.scores(attack, view, "a", knowledge, [*rows["a"], *rows["b"], rows["b"][0]])
    assert shared.computed == 8


def test_what_is_known_is_not_taken_for_other_rows_tasks_or_runs(run, tmp_path):
    view, knowledge, rows = run("fedavg")
    shared = Shared(ATTACKS)
    (attack, *_), equal = ATTACKS, [(x.clone(), y) for x, y in rows["a"]]
    first = shared.scores(attack, view, "a", knowledge, rows["a"])["alignment"]
    other = shared.scores(attack, view, "a", knowledge, points(4, 7))["alignment"]
    assert not np.allclose(first, other)
    assert shared.scores(attack, view, "a", knowledge, equal)["alignment"] == pytest.approx(first, abs=0)
    task = Linear()
    task.base = -task.base
    apart = Knowledge(task, knowledge.initial)
    found = shared.scores(attack, view, "a", apart, rows["a"])["alignment"]
    assert found == pytest.approx(attack.scores(view, "a", apart, rows["a"])["alignment"], abs=0)
    assert not np.allclose(found, first)


def test_without_rows_there_is_nothing_to_compute(run):
    view, knowledge, _ = run("fedrand")
    shared = Shared(ATTACKS)
    for attack in ATTACKS:
        assert all(len(scores) == 0 for scores in shared.scores(attack, view, "a", knowledge, []).values())
    assert shared.computed == 0


def steps_of(found: Collector, view, knowledge, rows) -> list[Step]:
    """Every attack on the uploads of each site: its own rows, and rows of nobody."""
    nobody = Sample(points(5, 7), [""] * 5)
    return [
        step
        for site in SITES
        for step in found.upload_steps(site, view, site, knowledge, Sample(rows[site], [""] * 4), nobody)
    ]


@pytest.mark.long
def test_an_audit_s_steps_share_gradients_and_stay_apart_in_time(run):
    """Each attack is a step of its own, at its own cost: one for which there is no time is left out."""
    view, knowledge, rows = run("fedavg")
    nobody = Sample(points(5, 7), [""] * 5)
    whole, alone = ({}, {})
    found = Collector(ATTACKS, None, nobody, 0, lambda text: None, whole)
    assert taken(steps_of(found, view, knowledge, rows), Budget()) == []
    assert found._shared.computed == 3 * (3 * 4 + 5)  # rounds times rows; each alone would take 27, 27 and 81
    for attack in ATTACKS:
        taken(steps_of(Collector([attack], None, nobody, 0, lambda text: None, alone), view, knowledge, rows), Budget())
    assert whole.keys() == alone.keys()
    for key, sides in whole.items():
        assert [side.tolist() for side in sides] == [pytest.approx(side.tolist(), abs=1e-12) for side in alone[key]]
    now = [0.0]

    def seconds() -> float:
        now[0] += 1  # each look at the clock takes a second
        return now[0]

    short = Collector(ATTACKS, None, nobody, 0, lambda text: None)
    left = taken(steps_of(short, view, knowledge, rows), Budget(16.0, seconds))
    assert {f.attack for f in short.done} == {"alignment", "projection of A", "projection of B"}
    assert {(step.attacks, step.on) for step in left} >= {("FedMia", site) for site in SITES}
    assert short._shared.computed == 3 * 4 + 5, "nothing of the rounds that FedMIA alone reads"


def naive(view: View, site: str, initial) -> Iterator[Turn]:
    """Every turn from the first on, each from all that came before it."""
    seen: dict[str, torch.Tensor] = {}
    for upload in view.uploads(site):
        got = tensors_of(view.answered(upload).payload)
        sent = view.added(upload)
        kept = {**initial, **got, **seen}
        start = {n: got.get(n, kept[n]) if n in sent else kept[n] for n in initial}
        yield Turn(upload.round, start, {n: w - start[n] for n, w in sent.items()})
        if getattr(view.exchange.method, "past", True):
            seen |= sent


@pytest.mark.parametrize(
    ("name", "fields", "fraction"),
    [("fedavg", "", 1.0), ("fedrand", "", 1.0), ("fedrand", "", 0.67), ("fedrand", "past = false", 1.0)],
)
def test_a_turn_rebuilt_by_itself_is_that_of_the_whole_history(name, fields, fraction, run):
    view, knowledge, _ = run(name, fields, fraction)
    turns = Turns(view, knowledge.initial)
    assert turns.sites == view.sites
    for site in turns.sites:
        expected = list(naive(view, site, knowledge.initial))
        assert turns.rounds(site) == [turn.round for turn in expected]
        for i in reversed(range(len(expected))):
            found = turns.at(site, i)
            assert found.round == expected[i].round
            assert found.starts_at == expected[i].starts_at
            assert found.moves_by == expected[i].moves_by
            assert all(torch.equal(found.start[n], w) for n, w in expected[i].start.items())
        assert turns.at(site, -1).round == expected[-1].round
    assert turns.rounds("nobody") == []


def test_only_what_a_turn_needs_is_decoded(run):
    """FedAvg's last turn needs its own two messages, however long the run was."""
    view, knowledge, _ = run("fedavg")
    decoded = []

    class Counted(View):
        def _decode(self, seen):
            decoded.append((seen.round, seen.direction))
            return super()._decode(seen)

    Turns(Counted(view.tap, view.exchange), knowledge.initial).at("b", -1)
    assert sorted(decoded) == [(2, "down"), (2, "up")]


def test_a_site_of_a_lower_rank_began_with_zeros_beyond_it(run):
    """HetLoRA sends it a cut pair, and it sends one."""
    view, knowledge, _ = run("hetlora", "ranks = { b = 1 }\nadapter = { rank = 3 }")
    low, whole = (Turns(view, knowledge.initial).at(site, -1) for site in "ba")
    assert not low.start["m.lora_A"][1:].any()
    assert not low.moved["m.lora_B"][:, 1:].any()
    assert low.moved["m.lora_B"][:, 0].all()
    assert whole.start["m.lora_A"].all()


def test_scaffold_s_correction_is_known_and_taken_off_a_move(run):
    """c_i is the site's gradient at the broadcast that it answered last, as nothing else was ever its c_i."""
    view, knowledge, rows = run("scaffold")
    turns, task = Turns(view, knowledge.initial), Linear()
    downs = [tensors_of(view.read(part.down).payload) for part in view.participations()["b"]]
    ups = [tensors_of(view.read(part.up).payload) for part in view.participations()["b"]]
    assert turns._control("b", 0) == {}
    for index in (2, 1):  # from the last back: what was added up for a later turn is not taken for an earlier one's
        moved = turns.at("b", index).moved
        before = Descent(task, rows["b"]).gradient({n: downs[index - 1][n] for n in task.spec}).weights
        correction = {n: downs[index][f"control.{n}"] - before[n] for n in task.spec}
        plain = {n: ups[index][n] - downs[index][n] for n in task.spec}
        assert sum(float((moved[n] * correction[n]).sum()) for n in moved) == pytest.approx(0, abs=1e-6)
        assert sum(float((moved[n] * correction[n].sign()).sum()) for n in moved) == pytest.approx(0, abs=1e-6)
        for n, value in without(plain, correction).items():
            assert moved[n] == pytest.approx(value, abs=1e-5)
        assert abs(sum(float((plain[n] * correction[n]).sum()) for n in plain)) > 1e-4

    class Summed(View):
        is_unseen = True

    whole = Turns(Summed(view.tap, view.exchange), knowledge.initial).at("b", 1)
    assert all(torch.equal(whole.moved[n], ups[1][n] - downs[1][n]) for n in task.spec)  # of several sites: as it is

    class Deaf(View):
        def participations(self):
            parts = super().participations()
            return {site: [replace(part, down=None) for part in of] for site, of in parts.items()}

    unheard = Turns(Deaf(view.tap, view.exchange), knowledge.initial).at("b", 1)  # c is not known
    assert all(torch.equal(unheard.moved[n], ups[1][n] - ups[0][n]) for n in task.spec)  # from where it was last seen
    first = turns.at("b", 0)
    assert all(torch.equal(first.moved[n], ups[0][n] - downs[0][n]) for n in task.spec)  # c = c_i = 0


def test_a_site_whose_changes_add_up_beyond_fp32_is_read_all_the_same(run):
    """Each was within what a message may hold; an infinite sum would end the audit of everybody."""
    view, knowledge, _ = run("scaffold")

    class Huge(View):
        def _decode(self, seen):
            found = super()._decode(seen)
            fields = {
                n: torch.full_like(t, 3e38) if seen.direction == "up" and n.startswith("control.") else t
                for n, t in found.payload.fields.items()
            }
            return replace(found, payload=replace(found.payload, fields=fields))

    moved = Turns(Huge(view.tap, view.exchange), knowledge.initial).at("b", 2).moved
    assert all(bool(value.isfinite().all()) for value in moved.values())
    assert any(bool(value.any()) for value in moved.values())


def test_what_is_left_of_a_move_is_what_no_correction_explains():
    """By hand; a correction whose signs point as it does is one direction, and none at all takes nothing."""
    moved = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[5.0]])}
    left = without(moved, {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([[0.0]])})
    assert torch.allclose(left["a"], torch.tensor([1.0, -1.0]))
    assert torch.allclose(left["b"], torch.tensor([[5.0]]))
    left = without(moved, {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([[0.0]])})
    assert torch.allclose(left["a"], torch.zeros(2), atol=1e-6)
    assert torch.allclose(left["b"], torch.tensor([[5.0]]))
    none = without(moved, {n: torch.zeros_like(t) for n, t in moved.items()})
    assert all(torch.equal(none[n], moved[n]) for n in moved)


def test_a_run_whose_sites_train_beside_a_residual_is_left_to_other_attacks(run):
    """Its start would be wrong, and a score that tells nothing would pass for a run that leaks nothing."""
    view, knowledge, _ = run("fedavg")

    class Beside(Linear):
        @property
        def spec(self):
            return {**super().spec, "m.residual": TensorSpec((2, 2), fixed=True)}

    for attack in ATTACKS:
        assert attack.misfit(view, knowledge) == ""
        assert "beside a residual" in attack.misfit(view, Knowledge(Beside(), knowledge.initial))
