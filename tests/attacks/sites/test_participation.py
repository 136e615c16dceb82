"""Inference of the participants of a round on a small classifier, with controls that must succeed and fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil import strategies
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.secagg_views import SecureSumView
from fedveil.attacks.sites.participation import ParticipationScores, participation_scores
from fedveil.attacks.statistics import area_under_roc
from fedveil.federation.exchange import MessageExchange
from tests.attacks.toy import WIDTH, Descent, Linear, federation, points

SITES, ABSENT = [f"s{i}" for i in range(6)], ["out0", "out1", "out2"]
SIZE, KNOWN = 24, 12


def cut(names, seed: int = 5):
    """Of each name rows round a place of its own, to train on and as the attacker holds them; and rows of nobody."""
    stream = torch.Generator().manual_seed(seed)
    drawn = iter(points((SIZE + KNOWN) * (len(names) + 1), seed))
    trained, known_rows = {}, {}
    for name in names:
        place, label = torch.randn(WIDTH, generator=stream), int(torch.randint(4, (), generator=stream))
        trained[name], known_rows[name] = ([(next(drawn)[0] + place, label) for _ in range(n)] for n in (SIZE, KNOWN))
    return trained, known_rows, [next(drawn) for _ in range(KNOWN)]


def attacked(tmp_path, name="fedavg", sums=False, fraction=0.5, rounds=12, absent=ABSENT, train=None, seed=5):
    method, task = strategies.create_method(name), Linear()
    trained, known_rows, nobody = cut([*SITES, *absent], seed)
    train = train or (lambda site: Descent(task, trained[site]))
    locals_ = {site: train(site) for site in SITES}
    run = federation(method, name, tmp_path, locals_, task.initial(), rounds, fraction, seed)
    run.run()
    knowledge = AdversaryKnowledge(task, task.initial(), run.models()["server"])
    exchange = MessageExchange(method, name, task.spec)
    view = (
        SecureSumView.from_capture(run.tap, exchange, knowledge.server)
        if sums
        else AdversaryView.server(run.tap, exchange)
    )
    return participation_scores(view, knowledge, known_rows, nobody), (view, knowledge, known_rows, nobody)


def told(found: ParticipationScores, of=None, names=SITES) -> float:
    """AUROC of turns with each of these candidates beside turns without."""
    at = [found.candidates.index(name) for name in names]
    scores, truth = found.in_a_round()[:, at], found.truth(of)[:, at]
    return area_under_roc(scores[truth], scores[~truth])


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrand", "ffa_lora", "rolora"])
def test_the_undefended_control_is_won(tmp_path, name):
    """Uploads site by site: whose is this one?"""
    scores, _ = attacked(tmp_path, name, fraction=1.0, rounds=3)
    assert told(scores) > 0.9


@pytest.mark.long
def test_sums_of_changing_cohorts_show_who_was_in_them(tmp_path):
    areas = []
    for seed in range(3):
        scores, _ = attacked(tmp_path / str(seed), sums=True, seed=seed)
        assert [round_ for round_, _ in scores.turns] == list(range(12))  # a round has one sum
        assert {len(sites) for _, sites in scores.turns} == {3}
        areas.append(told(scores))
    assert min(areas) > 0.6
    assert np.mean(areas) > 0.7


@pytest.mark.long
@pytest.mark.parametrize("sums", [False, True])
def test_who_never_took_part_is_in_no_round(tmp_path, sums):
    """Asked about the rounds of another site, the attack guesses: in the mean of draws."""
    pairs = dict(zip(ABSENT, SITES, strict=False))
    areas = [told(attacked(tmp_path / str(s), sums=sums, seed=s)[0], pairs, ABSENT) for s in range(6)]
    assert 0.35 < np.mean(areas) < 0.65


class Adrift(Descent):
    """A site whose upload holds nothing of its rows."""

    def train(self, weights, frozen=None, penalty=None):
        done = super().train(weights, frozen, penalty)
        stream = torch.Generator().manual_seed(id(self) % 99991 + len(self.started_from))
        return type(done)({n: w + torch.randn(w.shape, generator=stream) for n, w in weights.items()}, done.report)


@pytest.mark.long
def test_who_was_untrained_is_told_from_nobody(tmp_path):
    """Sites that drift by chance: neither the round nor the run says who they were."""
    areas = []
    for seed in range(6):
        task, (trained, _, _) = Linear(), cut([*SITES, *ABSENT], seed)
        drift = lambda site, task=task, trained=trained: Adrift(task, trained[site])  # noqa: E731
        areas.append(told(attacked(tmp_path / str(seed), fraction=1.0, rounds=3, train=drift, seed=seed)[0]))
    assert 0.35 < np.mean(areas) < 0.65


def test_who_moves_nothing_leans_nowhere(tmp_path):
    task, (trained, _, _) = Linear(), cut([*SITES, *ABSENT])
    scores, _ = attacked(tmp_path, rounds=2, train=lambda site: Descent(task, trained[site], steps=0))
    assert not scores.values.any()


def test_who_took_part_in_every_round_is_told_from_who_never_did(tmp_path):
    participation, _ = attacked(tmp_path, sums=True, fraction=1.0, rounds=4)
    scores = participation.at_all()
    assert area_under_roc(scores[: len(SITES)], scores[len(SITES) :]) > 0.8


@pytest.mark.long
def test_a_leaning_is_that_of_its_equations(tmp_path):
    """A naive twin: all tensors in one vector, one upload at a time."""
    scores, (view, knowledge, known_rows, nobody) = attacked(tmp_path, rounds=1, fraction=1.0)
    task, start = knowledge.task, knowledge.initial

    def unit(row):
        task.put(start)
        gradients = torch.autograd.grad(task.loss_sum(task.collate([row])), list(task.trained.values()))
        flat = torch.cat([g.flatten() for g in gradients]).double()
        return flat / flat.norm()

    def mean(rows):
        return torch.stack([unit(row) for row in rows]).mean(0)

    for (_, (site,)), values in zip(scores.turns, scores.values, strict=True):
        sent = next(view.uploads(site)).payload.fields
        moved = torch.cat([(sent[n] - start[n]).flatten() for n in task.trained]).double()
        wanted = [-float((mean(rows) - mean(nobody)) @ moved / moved.norm()) for rows in known_rows.values()]
        assert values == pytest.approx(wanted, rel=1e-5)


def test_scores_by_hand():
    scores = ParticipationScores(
        [(0, frozenset("a")), (0, frozenset("b")), (1, frozenset("a"))],
        ["a", "b"],
        np.array([[3.0, 1.0], [0.0, 4.0], [5.0, 1.0]]),
    )
    # Less the candidates' mean of each turn: a is 1, -2, 2 and b the opposite; a's mean is 1/3.
    assert scores.in_a_round()[:, 0] == pytest.approx([2 / 3, -7 / 3, 5 / 3])
    assert scores.at_all() == pytest.approx([(1 + 2) / 2, (2 - 2) / 2])
    assert scores.truth().tolist() == [[True, False], [False, True], [True, False]]
    assert scores.truth({"b": "a"})[:, 1].tolist() == [True, False, True]


def test_a_candidate_without_rows_is_refused(tmp_path):
    _, (view, knowledge, known_rows, nobody) = attacked(tmp_path, rounds=1)
    with pytest.raises(ValueError, match="add examples for each"):
        participation_scores(view, knowledge, known_rows | {"s0": []}, nobody)
    with pytest.raises(ValueError, match="add examples for each"):
        participation_scores(view, knowledge, known_rows, [])


def test_who_sent_a_alone_and_whose_b_was_never_seen_cannot_be_asked_about(tmp_path):
    with pytest.raises(ValueError, match="no gradient in any upload"):
        attacked(tmp_path, "fedsa_lora", rounds=1)
