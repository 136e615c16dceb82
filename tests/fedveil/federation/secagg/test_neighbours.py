"""Masks and shares over neighbours on a circle: sums of many sites, and masks that do not connect the sites."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from fedveil.errors import PolicyError, QuorumError
from fedveil.federation.secagg import graph_connectivity
from fedveil.federation.secagg.plan import AttemptPlan, Prekey
from fedveil.federation.secagg.server import SecAggConfig, derive_graph
from tests.fedveil.federation.secagg.sites import (
    RUN,
    add,
    agree_request,
    agreed,
    drawn,
    masked,
    names,
    open_request,
    run,
    stranger,
    unmasked,
)  # fmt: skip

FORTY = names(40)


def plan_of(count: int, neighbours: int, **update) -> AttemptPlan:
    """A plan whose keys nobody has."""
    members = tuple(
        Prekey(site=name, signing_key="0" * 64, number=0, key=stranger().hex(), signature="0" * 128)
        for name in names(count)
    )
    numbers = {"least": 2, "colluding": 1, "quorum": 2 * count // 3 + 1, "threshold": 2}
    return AttemptPlan(
        run=RUN, round=0, attempt=0, roster="", app="", config="0" * 64, broadcast="", entries="", bits=32,
        most_weight=1, bound=1.0, noise="site", neighbours=neighbours, members=members, **(numbers | update),
    )  # fmt: skip


@pytest.fixture(scope="module")
def forty():
    """Keys of forty sites with eighteen neighbours each."""
    return run(FORTY, least=3, neighbours=18)


@pytest.mark.long
@pytest.mark.parametrize(("count", "silent"), [(40, 0), (40, 8), (101, 20)])
def test_the_sum_of_many_sites_is_exact(count, silent, forty):
    """A fifth of the sites is silent before the upload, or one less, which is silent afterwards."""
    sites = names(count)
    local = forty if count == 40 else run(sites, least=3)
    attempt = local.begin(int(silent > 0), 0, sites)
    assert attempt.plan.neighbours == (18 if count == 40 else 22)
    there = set(sites) - set(random.Random(27).sample(sites, silent))
    vectors = {s: drawn(17, i) for i, s in enumerate(sites) if s in there}
    add(attempt, masked(local, attempt, vectors))
    total = unmasked(local, attempt, deaf=sorted(there)[:1])
    assert total.tolist() == sum(vectors.values()).tolist()


@pytest.mark.parametrize(("count", "k"), [(5, 2), (7, 4), (40, 8), (40, 32), (100, 32)])
def test_every_site_holds_shares_of_those_that_hold_its_own(count, k):
    plan = plan_of(count, k)
    for name in plan.cohort:
        holders = plan.holders(name)
        assert holders == plan.partners(name) == sorted(set(holders))
        assert len(holders) == k
        assert name not in holders
        assert all(name in plan.holders(holder) for holder in holders)
        assert [plan.place(name, holder) for holder in holders] == list(range(1, k + 1))


def test_with_all_pairs_a_site_is_its_own_holder_and_not_its_own_partner():
    plan = plan_of(5, 0)
    assert plan.holders("s02") == names(5)
    assert plan.partners("s02") == ["s00", "s01", "s03", "s04"]


def test_the_circle_changes_with_the_plan():
    plan = plan_of(40, 8)
    other = plan.model_validate(plan.model_dump() | {"attempt": 1})
    moved = [name for name in plan.cohort if plan.holders(name) != other.holders(name)]
    assert len(moved) > 30  # the chance that a site keeps its eight neighbours is 1 in 61 million
    assert AttemptPlan.from_bytes(plan.to_bytes()).circle == plan.circle


def connected_without(plan: AttemptPlan, sites: set[str], colluding: int) -> bool:
    """By trying every choice of colluding sites: whether the masks connect the others."""
    for out in combinations(sorted(sites), colluding):
        left = sites - set(out)
        reached, edge = set(), sorted(left)[:1]
        while edge:
            site = edge.pop()
            reached.add(site)
            edge += [other for other in plan.partners(site) if other in left - reached]
        if reached != left:
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_the_windows_find_what_a_search_through_all_choices_of_colluding_sites_finds(seed):
    drawing = random.Random(seed)
    count = drawing.randint(5, 10)
    plan = plan_of(count, drawing.choice([k for k in (2, 4, 6) if k < count]))
    sites = set(drawing.sample(plan.cohort, drawing.randint(3, count)))
    for colluding in range(len(sites) - 2):
        found = graph_connectivity.is_connected(plan, sites, colluding)
        assert found == connected_without(plan, sites, colluding), (plan.neighbours, count, len(sites), colluding)


def test_partners_by_hand():
    """Circle of ten, two neighbours: without two sites that are not side by side there are two arcs."""
    plan = plan_of(10, 2)
    order = plan.circle
    assert graph_connectivity.is_connected(plan, order, 1)
    assert not graph_connectivity.is_connected(plan, order, 2)
    assert not graph_connectivity.is_connected(plan, [*order[:4], *order[5:9]], 0)
    assert graph_connectivity.fewest_partners(plan, order) == 2
    assert graph_connectivity.fewest_partners(plan, order[1:]) == 1
    assert graph_connectivity.fewest_partners(plan, [order[0], *order[2:9]]) == 0
    assert graph_connectivity.fewest_partners(plan, []) == 0
    assert graph_connectivity.is_connected(plan_of(10, 0), names(10)[::2], 3)


# Section 9 of the protocol, a fifth of the sites absent: sites, colluding, k, t.
TABLE = [
    (100, 1, 14, 2), (100, 10, 28, 12), (100, 20, 42, 23),
    (300, 3, 22, 6), (300, 15, 42, 18), (300, 30, 64, 34), (300, 60, 104, 64),
    (1000, 3, 24, 6), (1000, 50, 100, 55), (1000, 100, 170, 106),
]  # fmt: skip


@pytest.mark.parametrize(("sites", "colluding", "k", "t"), TABLE)
def test_neighbours_and_threshold_are_those_of_the_table(sites, colluding, k, t):
    assert derive_graph(sites, colluding) == (k, t)


def test_no_graph_withstands_more_than_254_neighbours_do():
    with pytest.raises(QuorumError, match=r"secure\.graph-degree: .* need more than 254 neighbors"):
        derive_graph(1000, 200)  # the table has 304


def test_up_to_a_hundred_sites_have_all_pairs_and_more_have_neighbours_for_a_twentieth():
    settings = SecAggConfig(colluding=1)
    assert settings.graph(100) == (0, settings.quorum(100)) == (0, 67)
    assert settings.graph(101) == derive_graph(101, 6)
    assert settings.graph(300) == (42, 18)
    assert SecAggConfig(colluding=30).graph(300) == (64, 34)
    assert SecAggConfig(neighbours=22, colluding=3).graph(300) == (22, 6)
    assert SecAggConfig(neighbours=22).graph(22) == (0, 15)  # no more sites than that: all pairs
    # More than a hundred sites have no masks with all others, however many neighbours are asked for.
    assert SecAggConfig(neighbours=200).graph(150) == derive_graph(150, 8)


def test_noise_in_the_sum_needs_more_sites_than_may_collude():
    """Else every site would refuse the plan; noise at each site needs no others."""
    with pytest.raises(QuorumError, match=r"secure\.min-sites: .* must exceed the 3 that may collude"):
        SecAggConfig(least=3, colluding=3, noise="sum").check_cohort(9)
    SecAggConfig(least=3, colluding=3).check_cohort(9)
    SecAggConfig(least=4, colluding=3, noise="sum").check_cohort(9)


@pytest.mark.long
def test_a_sum_whose_masks_do_not_connect_it_is_signed_by_nobody(forty):
    """All neighbours of one site are silent: what it has sent stands alone."""
    attempt = forty.begin(2, 0, FORTY)
    near = set(attempt.plan.holders("s00"))
    uploads = masked(forty, attempt, {s: drawn(3, i) for i, s in enumerate(FORTY) if s not in sorted(near)[:-1]})
    add(attempt, uploads)
    assert len(uploads) < attempt.plan.quorum
    with pytest.raises(QuorumError, match=r"secure\.threshold"):
        attempt.close()
    with pytest.raises(PolicyError, match="at least 27 sites"):
        forty.sites["s00"].agree(agree_request(attempt.plan, uploads))


def test_a_list_that_colluding_sites_cut_or_in_which_a_site_has_too_few_holders_is_signed_by_nobody():
    """Ten sites on a circle with two neighbours each; the first check is the server's, the second each site's."""
    sites = names(10)
    local = run(sites, neighbours=4, colluding=1, threshold=6)
    attempt = local.begin(0, 0, sites)
    plan = attempt.plan
    order = plan.circle
    assert plan.threshold == 2
    without = [order[2], order[3], order[6], order[7]]  # two windows: 0, 1 | 4, 5 | 8, 9
    uploads = masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(sites) if s not in without})
    add(attempt, uploads)
    with pytest.raises(QuorumError, match=r"secure\.graph-degree"):
        attempt.close()
    assert attempt.in_sum == ()
    for site in uploads:
        with pytest.raises(PolicyError, match=r"secure\.graph-degree"):
            local.sites[site].agree(agree_request(plan, uploads))


def test_with_neighbours_the_whole_cohort_is_signed_for_too():
    sites = names(9)
    local = run(sites, neighbours=6, colluding=1)
    attempt = local.begin(0, 0, sites)
    vectors = {s: drawn(4, i) for i, s in enumerate(sites)}
    uploads = masked(local, attempt, vectors)
    add(attempt, uploads)
    with pytest.raises(PolicyError, match="sites' signatures of this list"):
        local.sites["s00"].open(open_request(attempt.plan, "s00", sites, uploads))
    attempt.close()
    assert attempt.needs_agreement
    with pytest.raises(QuorumError, match="sign the list"):
        attempt.open_requests()
    assert unmasked(local, _again(attempt)).tolist() == sum(vectors.values()).tolist()


def _again(attempt):
    """The attempt before its list was closed."""
    attempt.in_sum = ()
    return attempt


def test_a_holder_opens_one_list_also_of_sites_that_it_holds_nothing_of():
    sites = names(12)
    local = run(sites, neighbours=6, colluding=1)
    attempt = local.begin(0, 0, sites)
    plan = attempt.plan
    uploads = masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(sites)})
    far = next(s for s in sites if s not in ("s00", *plan.holders("s00")))
    lists = [sites, [s for s in sites if s != far]]
    first, other = (open_request(plan, "s00", of, uploads) for of in lists)
    assert first.rows == other.rows
    signed = agreed(local, plan, sites)
    assert set(local.sites["s00"].open(open_request(plan, "s00", sites, uploads, signed)).own) == set(first.rows)
    with pytest.raises(PolicyError, match="another list"):
        local.sites["s00"].open(other)
