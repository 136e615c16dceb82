"""Inference of a common property of a site's rows, on a transparent small classifier."""

from __future__ import annotations

import random

import pytest
import torch

from fedveil import strategies
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.secagg_views import SecureSumView
from fedveil.attacks.sites.property_inference import (
    PropertyScore,
    estimate_from_sums,
    estimate_from_uploads,
    pairwise_concordance,
    property_scores,
)
from fedveil.federation.exchange import MessageExchange
from tests.attacks.toy import WIDTH, Descent, Linear, federation, points

SHARES = {f"s{i}": i / 5 for i in range(6)}
SIZE = 60


def cut(has, seed: int = 5):
    """Rows of each site with the shares of SHARES, and 60 with and without the property, of no site."""
    drawn = [(x + 1.5 * torch.eye(WIDTH)[label], label) for x, label in points(1800, seed)]  # a class can be learned
    pools = {kind: [p for p in drawn if has(p) == kind] for kind in (True, False)}
    known = {kind: [pools[kind].pop() for _ in range(60)] for kind in pools}
    sites = {
        site: [pools[True].pop() for _ in range(round(share * SIZE))]
        + [pools[False].pop() for _ in range(SIZE - round(share * SIZE))]
        for site, share in SHARES.items()
    }
    return sites, known[True], known[False]


def is_first_class(point) -> bool:
    return point[1] == 0


def attacked(tmp_path, name: str, has, fraction: float = 1.0, rounds: int = 3, sums: bool = False):
    method, task = strategies.create_method(name), Linear()
    sites, having, lacking = cut(has)
    run = federation(
        method, name, tmp_path, {s: Descent(task, rows) for s, rows in sites.items()}, task.initial(), rounds, fraction
    )
    run.run()
    knowledge = AdversaryKnowledge(task, task.initial(), run.models()["server"])
    exchange = MessageExchange(method, name, task.spec)
    view = (
        SecureSumView.from_capture(run.tap, exchange, knowledge.server)
        if sums
        else AdversaryView.server(run.tap, exchange)
    )
    return property_scores(view, knowledge, having, lacking), (view, knowledge, having, lacking)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedrand", "ffa_lora", "rolora"])
def test_sites_are_ordered_by_their_share_of_a_class(tmp_path, name):
    scores, _ = attacked(tmp_path, name, is_first_class)
    assert {each.site for each in scores} == set(SHARES)  # FedRand has no leaning while its B was never seen
    assert pairwise_concordance(estimate_from_uploads(scores), SHARES) >= 0.8


@pytest.mark.long
def test_sites_are_not_ordered_by_what_nothing_can_learn(tmp_path):
    """Over eight draws of the rows: one alone may fall either way."""
    concordances = []
    for seed in range(8):
        has = lambda point, seed=seed: hash((seed, int(point[0][0].view(torch.int32)))) % 2 == 0  # noqa: E731
        concordances.append(
            pairwise_concordance(estimate_from_uploads(attacked(tmp_path / str(seed), "fedavg", has)[0]), SHARES)
        )
    assert 0.3 < sum(concordances) / len(concordances) < 0.7


@pytest.mark.long
def test_the_control_fails_where_its_property_goes_with_a_class(tmp_path):
    """Of nine rows in ten such a hash says whether they are of the first class: by it sites are ordered."""
    concordances = []
    for seed in range(3):

        def has(point, seed=seed):
            drawn = hash((seed, int(point[0][0].view(torch.int32)))) % 10
            return (point[1] == 0) == (drawn != 0)

        concordances.append(
            pairwise_concordance(estimate_from_uploads(attacked(tmp_path / str(seed), "fedavg", has)[0]), SHARES)
        )
    assert sum(concordances) / len(concordances) > 0.7


def test_a_leaning_is_that_of_its_equations(tmp_path):
    """A naive twin: one row, one gradient, all tensors in one vector."""
    scores, (view, knowledge, having, lacking) = attacked(tmp_path, "fedavg", is_first_class, rounds=1)
    task, start = knowledge.task, knowledge.initial

    def unit(row):
        task.put(start)
        gradients = torch.autograd.grad(task.loss_sum(task.collate([row])), list(task.trained.values()))
        flat = torch.cat([g.flatten() for g in gradients]).double()
        return flat / flat.norm()

    direction = torch.stack([unit(r) for r in having]).mean(0) - torch.stack([unit(r) for r in lacking]).mean(0)
    for each in scores:
        sent = next(view.uploads(each.site)).payload.fields
        moved = torch.cat([(sent[n] - start[n]).flatten() for n in task.trained]).double()
        assert each.value == pytest.approx(-float(direction @ moved / moved.norm()), rel=1e-5)


def test_who_sent_a_alone_and_whose_b_was_never_seen_has_no_leaning(tmp_path):
    scores, _ = attacked(tmp_path, "fedsa_lora", is_first_class, rounds=1)
    assert scores == []


def test_the_sum_of_the_same_sites_in_every_round_orders_none(tmp_path):
    scores, _ = attacked(tmp_path, "fedavg", is_first_class, sums=True)
    assert pairwise_concordance(estimate_from_sums(scores), SHARES) == 0.5
    assert len({(each.round, each.value) for each in scores}) == 3


@pytest.mark.long
def test_sums_of_changing_cohorts_are_told_apart(tmp_path):
    scores, _ = attacked(tmp_path, "fedavg", is_first_class, fraction=0.5, rounds=24, sums=True)
    assert pairwise_concordance(estimate_from_sums(scores), SHARES) >= 0.8


def test_exact_sums_are_taken_apart():
    drawn, true = random.Random(7), {f"s{i}": float(i * i) for i in range(5)}
    cohorts = [drawn.sample(sorted(true), 3) for _ in range(400)]
    scores = [PropertyScore(t, s, 11 + sum(true[k] for k in c) / 3) for t, c in enumerate(cohorts) for s in c]
    assert estimate_from_sums(scores) == pytest.approx({site: z - 6 for site, z in true.items()}, abs=0.1)


def test_what_turns_of_a_round_with_the_same_tensors_share_is_no_estimate():
    """Two factors with offsets of their own, and sites that send now this one, now that one."""
    drawn, true = random.Random(8), {f"s{i}": i - 2.0 for i in range(5)}
    offsets = {(t, part): drawn.uniform(-50, 50) for t in range(40) for part in "AB"}
    scores = [
        PropertyScore(t, site, z + offsets[t, part], frozenset(part))
        for t in range(40)
        for site, z in true.items()
        for part in drawn.choice("AB")
    ]
    assert estimate_from_uploads(scores) == pytest.approx(true, abs=0.1)


def test_concordance_by_hand():
    shares = {"a": 0.1, "b": 0.2, "c": 0.2, "d": 0.9}
    assert pairwise_concordance({"a": 1.0, "b": 2.0, "c": 2.0, "d": 3.0}, shares) == 1.0
    assert pairwise_concordance({"a": 3.0, "b": 2.0, "c": 2.0, "d": 1.0}, shares) == 0.0
    assert pairwise_concordance({"a": 1.0, "b": 1.0, "d": 1.0}, shares) == 0.5
    assert pairwise_concordance({"a": 2.0, "b": 1.0, "d": 3.0}, shares) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="shares: no two sites"):
        pairwise_concordance({"b": 1.0, "c": 2.0}, shares)


def test_a_site_that_moves_nothing_leans_nowhere(tmp_path):
    method, task = strategies.create_method("fedavg"), Linear()
    sites, having, lacking = cut(is_first_class)
    locals_ = {s: Descent(task, rows, steps=0) for s, rows in sites.items()}
    run = federation(method, "fedavg", tmp_path, locals_, task.initial(), 1)
    run.run()
    knowledge = AdversaryKnowledge(task, task.initial(), run.models()["server"])
    view = AdversaryView.server(run.tap, MessageExchange(method, "fedavg", task.spec))
    assert [each.value for each in property_scores(view, knowledge, having, lacking)] == [0.0] * len(SHARES)
