"""What moved A where B was never seen, against rows' gradients at a B that nobody knows, on a linear model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership.a_factor_overlap import EPSILON, is_blind, overlap_with, probe_b_factor
from fedveil.attacks.membership.alignment import PROBES, AlignmentAttack, alignment_scores
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.gradient_attacks import COSINE, GradientReading, SharedGradientScorer
from fedveil.attacks.statistics import area_under_roc
from tests.attacks.toy import CLASSES, RANK, WIDTH, Descent, Linear, points

NOBODY = points(60, 7)
SITES = "abc"


@pytest.fixture
def attacked(federate):
    """Three sites of so many rows, so many rounds: view, knowledge and rows. B starts at 0 and its training is real."""

    def run(name: str, fields: str = "", rows: int = 3, rounds: int = 4, steps: int = 6, seed: int = 3):
        task, own = Linear(), {site: points(rows, 100 * seed + i) for i, site in enumerate(SITES)}
        locals_ = {site: Descent(task, own[site], steps=steps, rate=0.5) for site in own}
        federation, view = federate(
            name,
            task.spec,
            task.initial(),
            lambda site, _: locals_[site],
            fields,
            sites=SITES,
            rounds=rounds,
            seed=seed,
        )
        federation.run()
        return view, AdversaryKnowledge(task, task.initial()), own

    return run


def area(view, knowledge, own, beside: int = 0) -> float:
    """Over all sites, of their rows against those of nobody."""
    mine, others = (
        np.concatenate(
            [alignment_scores(view, SITES[i - beside], knowledge, of or own[s]) for i, s in enumerate(SITES)]
        )
        for of in ([], NOBODY)
    )
    return area_under_roc(mine, others)


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), [("fedsa_lora", ""), ("fedrand", "rho = 1.0")])
def test_it_wins_where_b_never_leaves_and_a_cosine_says_nothing(name, fields, attacked):
    view, knowledge, own = attacked(name, fields)
    turn = ObservedClientUpdates(view, knowledge.initial).at("a", -1)
    assert is_blind(turn)
    shared = SharedGradientScorer([AlignmentAttack()])
    (cosines,) = shared._measured(knowledge.task, iter([GradientReading(COSINE, turn)]), iter([]), [*own["a"], *NOBODY])
    assert not cosines.any()
    areas = [area(*attacked(name, fields, seed=seed)) for seed in (3, 4, 5)]
    wrong = [area(*attacked(name, fields, seed=seed), beside=1) for seed in (13, 14, 15)]
    assert np.mean(areas) > 0.85, areas
    assert abs(np.mean(wrong) - 0.5) < 0.2, wrong


def test_by_hand_a_row_along_the_move_scores_one_and_one_across_it_nothing(attacked):
    """A moved by e x^T for some e, so the row's own overlap is 1 and that of an orthogonal x is 0."""
    view, knowledge, own = attacked("fedsa_lora", rows=1, rounds=1, steps=2)
    x, y = own["a"][0]
    other = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    other = other - x * (other @ x) / (x @ x)
    scores = alignment_scores(view, "a", knowledge, [(x, y), (other, y), (3 * x + other, y)])
    assert scores[0] == pytest.approx(1.0, abs=1e-4)
    assert scores[1] == pytest.approx(0.0, abs=1e-4)
    assert 0.5 < scores[2] < 1.0


def test_nothing_moved_scores_every_row_nothing(attacked):
    view, knowledge, own = attacked("fedsa_lora", steps=0)
    assert not alignment_scores(view, "a", knowledge, [*own["a"], *NOBODY]).any()


def test_a_turn_is_blind_only_where_a_went_alone_and_no_b_was_ever_seen(attacked):
    """FedRand: later on the broadcast has a mean B, which is the server's guess of what the site kept."""
    view, knowledge, _ = attacked("fedrand", rounds=4)
    turns = ObservedClientUpdates(view, knowledge.initial)
    first = {site: next(iter(turns.at(site, 0).moved))[-1] for site in SITES}
    assert set(first.values()) == {"A", "B"}
    for site in SITES:
        assert [is_blind(turns.at(site, i)) for i in range(4)] == [first[site] == "A", False, False, False]
    for name in ("fedavg", "ffa_lora", "rolora", "la_lora"):
        view, knowledge, _ = attacked(name, rounds=2)
        turns = ObservedClientUpdates(view, knowledge.initial)
        assert not any(is_blind(turns.at(site, i)) for site in SITES for i in range(2)), name


def test_it_asks_for_one_gradient_a_row_where_b_is_known_and_one_a_probe_where_not(attacked):
    for name, asked in (("fedavg", 1), ("fedsa_lora", PROBES)):
        view, knowledge, _ = attacked(name, rounds=1)
        shared = SharedGradientScorer([AlignmentAttack()], others=0)
        shared.scores(AlignmentAttack(), view, "a", knowledge, NOBODY)
        assert shared.computed == asked * len(NOBODY)


def test_probes_are_orthonormal_and_the_same_everywhere():
    start = {"m.lora_A": torch.ones(RANK, WIDTH), "m.lora_B": torch.zeros(CLASSES, RANK), "n.lora_B": torch.zeros(2, 5)}
    turn = ObservedClientUpdate(3, start, {"m.lora_A": torch.ones(RANK, WIDTH)})
    first, again, other = probe_b_factor(turn, 0), probe_b_factor(replace(turn, round=4), 0), probe_b_factor(turn, 1)
    b = first.start["m.lora_B"]
    assert torch.equal(b, again.start["m.lora_B"])
    assert not torch.equal(b, other.start["m.lora_B"])
    assert (turn.probe, first.probe, other.probe) == (None, 0, 1)
    torch.testing.assert_close(b.T @ b, EPSILON**2 * torch.eye(RANK), atol=1e-11, rtol=1e-4)
    assert first.start["m.lora_A"] is start["m.lora_A"]
    assert not start["m.lora_B"].any()
    wide = first.start["n.lora_B"]
    assert wide[:, :2].all()
    assert not wide[:, 2:].any()


def test_overlap_by_hand():
    """g = [1, 0], D = [3, 4]: |g D^T| = 3 of 1 * 5. A layer without a move counts for nothing."""
    turn = ObservedClientUpdate(0, {}, {"m.lora_A": torch.tensor([[3.0, 4.0]])})
    read = overlap_with(turn)
    gradient = {"m.lora_A": torch.tensor([[1.0, 0.0]]), "m.lora_B": torch.tensor([[9.0]])}
    assert read(gradient) == (pytest.approx(0.6),)
    assert read({**gradient, "n.lora_A": torch.tensor([[5.0]])}) == (pytest.approx(0.6),)
    assert read({"m.lora_A": torch.zeros(1, 2)}) == (0.0,)
    assert overlap_with(ObservedClientUpdate(0, {}, {"m.lora_A": torch.zeros(1, 2)}))(gradient) == (0.0,)
