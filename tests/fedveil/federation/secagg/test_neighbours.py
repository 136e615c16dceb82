"""Masks and shares over neighbours on a circle: sums of many sites, and parts that nothing joins to the rest."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.federation.secagg import graph_connectivity
from fedveil.federation.secagg.membership import RunMember, RunMembership
from fedveil.federation.secagg.messages import UnmaskRequest
from fedveil.federation.secagg.pairwise_keys import mask_partners
from fedveil.federation.secagg.server import SecAggConfig
from tests.fedveil.federation.secagg.sites import (
    RUN,
    add,
    changed,
    drawn,
    masked,
    names,
    question,
    run,
    stranger,
    unmasked,
)  # fmt: skip

FORTY = names(40)


def membership_of(count: int, neighbours: int) -> RunMembership:
    members = tuple(
        RunMember(name=name, signing_key="0" * 64, run_key=stranger().hex(), signature="0" * 128)
        for name in names(count)
    )
    return SecAggConfig(neighbours=neighbours).membership(RUN, members)


@pytest.fixture(scope="module")
def forty():
    """Keys of forty sites with eight neighbours each."""
    local = run(FORTY, least=3, neighbours=8)
    local.begin(0, 0, FORTY)
    return local


@pytest.mark.long
@pytest.mark.parametrize(("count", "silent"), [(40, 0), (40, 13), (100, 33)])
def test_the_sum_of_many_sites_is_exact(count, silent, forty):
    """The silent third answers as holder, but for one site that is dead."""
    sites = names(count)
    local = forty if count == 40 else run(sites, least=3, neighbours=8)
    attempt = local.begin(1, 0, sites)
    thirds = (set(sites) - set(random.Random(i).sample(sites, silent)) for i in range(100))
    there = next(third for third in thirds if graph_connectivity.smallest_component(attempt.membership, third) >= 3)
    vectors = {s: drawn(17, i) for i, s in enumerate(sites) if s in there}
    add(attempt, masked(local, attempt, vectors))
    total = unmasked(local, attempt, deaf=[s for s in sites if s not in there][:1])
    assert total.tolist() == sum(vectors.values()).tolist()
    for site, attached in attempt.uploads.items():
        local.coordinator.keep(site, attached.next)


@pytest.mark.parametrize(("count", "k"), [(5, 2), (7, 4), (40, 8), (40, 32), (100, 32)])
def test_every_site_holds_shares_of_those_that_hold_its_own(count, k):
    membership = membership_of(count, k)
    assert membership.count == k
    assert 2 * membership.threshold > k
    for name in membership.by_name:
        holders = membership.holders(name)
        assert len(set(holders)) == k
        assert holders == sorted(holders)
        assert name not in holders
        assert all(name in membership.holders(holder) for holder in holders)


def test_the_circle_changes_with_one_run_key():
    membership = membership_of(40, 8)
    first = membership.members[0]
    other = changed(
        membership,
        members=[
            {**first.model_dump(), "run_key": stranger().hex()},
            *(m.model_dump() for m in membership.members[1:]),
        ],
    )
    moved = [name for name in membership.by_name if membership.holders(name) != other.holders(name)]
    assert len(moved) > 30  # the chance that a site keeps its eight neighbours is 1 in 61 million
    assert RunMembership.from_bytes(membership.to_bytes()).holders(first.name) == membership.holders(first.name)


def test_parts_by_hand():
    """Circle of ten, two neighbours: without two sites that are not side by side there are two arcs."""
    membership = membership_of(10, 2)
    near, order = {n: membership.holders(n) for n in membership.by_name}, [names(10)[0]]
    while len(order) < 10:
        order.append(next(s for s in near[order[-1]] if s not in order))
    assert graph_connectivity.smallest_component(membership, order) == 10
    assert graph_connectivity.smallest_component(membership, order[1:]) == 9
    assert graph_connectivity.smallest_component(membership, [*order[:4], *order[5:9]]) == 4
    assert graph_connectivity.smallest_component(membership, [order[0], *order[2:9]]) == 1
    assert graph_connectivity.smallest_component(membership, []) == 0
    assert graph_connectivity.smallest_component(membership_of(10, 0), names(10)[::2]) == 5


@pytest.mark.long
def test_a_cohort_in_which_a_site_has_no_partner_is_not_masked_for(forty):
    """Its vector would have its own mask alone, which holders take off."""
    near = set(forty.coordinator.membership.holders("s00"))
    cohort = [s for s in FORTY if s not in near]
    attempt = forty.begin(2, 0, cohort)
    assert mask_partners(attempt.plan, attempt.membership, "s00") == []
    for site in ("s00", cohort[-1]):
        with pytest.raises(PolicyError, match="joined by masks"):
            forty.sites[site].begin(attempt.plan)


def test_a_sum_that_falls_apart_is_not_asked_for_and_not_opened(forty):
    """All neighbours of one site are silent: what it has sent stands alone."""
    attempt = forty.begin(3, 0, FORTY)
    near = set(attempt.membership.holders("s00"))
    uploads = masked(forty, attempt, {s: drawn(3, i) for i, s in enumerate(FORTY) if s not in near})
    add(attempt, uploads)
    with pytest.raises(
        QuorumError, match="secure.graph-degree: expected masks that join at least 3 sites, found a separate group of 1"
    ):
        attempt.questions()
    holder = sorted(near)[0]
    with pytest.raises(PolicyError, match="joined by masks"):
        forty.sites[holder].unmask(question(attempt.plan, attempt, holder, uploads, uploads))


@pytest.mark.long
def test_a_holder_answers_one_sum_also_of_sites_that_it_holds_nothing_of(forty):
    attempt = forty.begin(6, 0, FORTY)
    uploads = masked(forty, attempt, {s: drawn(3, i) for i, s in enumerate(FORTY)})
    far = next(s for s in FORTY if s not in ("s00", *attempt.membership.holders("s00")))
    first, other = (question(attempt.plan, attempt, "s00", set(FORTY) - out, uploads) for out in (set(), {far}))
    assert first.heard == other.heard
    forty.sites["s00"].unmask(first)
    with pytest.raises(PolicyError, match="never opens both halves"):
        forty.sites["s00"].unmask(other)


@pytest.mark.long
def test_a_site_that_nobody_near_has_uploaded_beside_leaves_no_mask_to_take_off(forty):
    """Its prekey need not be opened; the sum is exact all the same."""
    attempt = forty.begin(4, 0, FORTY)
    alone = {"s00", *attempt.membership.holders("s00")}
    vectors = {s: drawn(3, i) for i, s in enumerate(FORTY) if s not in alone}
    add(attempt, masked(forty, attempt, vectors))
    dead = sorted(attempt.membership.holders("s00"))[:3]
    if any(sum(h in dead for h in attempt.membership.holders(s)) > 2 for s in FORTY if s != "s00"):
        dead = dead[:2]
    total = unmasked(forty, attempt, deaf=dead)
    assert total.tolist() == np.sum(list(vectors.values()), axis=0, dtype=np.uint32).tolist()


def test_a_plan_with_one_that_is_no_member_is_refused(forty):
    attempt = forty.begin(5, 0, FORTY)
    foreign = changed(attempt.plan.prekeys[-1], site="s40")
    plan = changed(attempt.plan, prekeys=[p.model_dump() for p in (*attempt.plan.prekeys, foreign)])
    with pytest.raises(WireError, match="prekey of s40"):
        forty.sites["s00"].begin(plan)
    with pytest.raises(PolicyError, match="sites of the plan"):
        forty.sites["s00"].unmask(UnmaskRequest(plan=plan, in_sum=("s00", "s01", "s40"), heard={}, silent={}))
