"""A server that tells different sites different lists, with and without sites that work with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import PolicyError
from fedveil.federation.secagg import plan_checks
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import agree_request, drawn, masked, names, open_request, run


def opens(local, attempt, uploads, lists, colluding=()):
    """For each list, by site in the sum, the holders whose share of its own secret the server gets.

    Each honest site is asked to sign and to open its own lists in turn; a colluding one forgets what it has answered.
    """
    signed, opened = {}, {}
    for ask in ("agree", "open"):
        for holder, sums in lists.items():
            site = local.sites[holder]
            state = site.store.load()
            for in_sum in map(tuple, sums):
                if holder in colluding:
                    store = MemorySecAggStore()
                    live = state.live.model_copy(update={"phase": "masked", "list": "", "answer": None})
                    store.save(state.model_copy(update={"live": live}))
                    site = replace(site, store=store)
                try:
                    if ask == "agree":
                        signature = site.agree(agree_request(attempt.plan, in_sum)).signature
                        signed.setdefault(in_sum, {})[holder] = signature
                    else:
                        request = open_request(attempt.plan, holder, in_sum, uploads, signed.get(in_sum, {}))
                        for of in site.open(request).own:
                            opened.setdefault(in_sum, {}).setdefault(of, set()).add(holder)
                except PolicyError:
                    continue
    return opened


def opened_sums(attempt, opened) -> list[tuple[str, ...]]:
    """The lists all of whose own secrets the server can rebuild."""
    t = attempt.plan.threshold
    return [in_sum for in_sum, of in opened.items() if all(len(of.get(site, ())) >= t for site in in_sum)]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(count=st.integers(4, 8), data=st.data())
def test_no_split_of_the_sites_opens_two_sums(count, data):
    """Whatever each site is told, the whole cohort or all but one; as many as may, work with the server."""
    sites = names(count)
    local = run(sites)
    attempt = local.begin(0, 0, sites)
    plan = attempt.plan
    assert plan.quorum == plan.threshold == 2 * count // 3 + 1
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites)})
    victim, rest = sites[0], sites[1:]
    most = min(2 * plan.quorum - count - 1, plan.quorum - 2)
    colluding = data.draw(st.permutations(rest))[:most]
    first = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    both = data.draw(st.booleans())
    lists = {}
    for holder, says in zip(sites, first, strict=True):
        order = [sites, rest] if says or holder == victim else [rest, sites]
        lists[holder] = order if both or holder in colluding else order[:1]
    assert len(opened_sums(attempt, opens(local, attempt, uploads, lists, colluding))) <= 1


@pytest.mark.parametrize(("count", "quorum", "colluding"), [(6, 3, 0), (8, 4, 0), (7, 4, 1), (9, 5, 1), (8, 6, 4)])
def test_control_where_two_quorums_can_do_without_a_common_honest_site_a_split_opens_both(
    count, quorum, colluding, monkeypatch
):
    """2 q <= m + c: no site masks for such a plan, so the rule is left out; the last c, one above the most that the
    default quorum bears."""
    sites = names(count)
    local = run(sites, threshold=quorum, colluding=0)
    with monkeypatch.context() as patch:
        patch.setattr("fedveil.federation.secagg.server.SecAggConfig.check_cohort", lambda self, sites: None)
        attempt = local.begin(0, 0, sites)
    assert 2 * quorum <= count + colluding
    if 2 * quorum <= count:
        with pytest.raises(PolicyError, match=r"secure\.threshold: 2 q"):
            local.sites[sites[0]].begin(attempt.plan, local.terms(attempt.plan))
    monkeypatch.setattr(plan_checks, "require_numbers", lambda plan, demands: None)
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites)})
    rest, liars = sites[1:], sites[count - colluding :] if colluding else []
    lists = {s: [sites] if i % 2 == 0 else [rest] for i, s in enumerate(sites)} | {s: [sites, rest] for s in liars}
    assert len(opened_sums(attempt, opens(local, attempt, uploads, lists, liars))) == 2


@pytest.mark.parametrize("count", [10, 16])
def test_no_choice_of_lists_opens_one_site_alone(count):
    """Each site sees a sum of as few as it signs for, with itself and the victim in it: no list has a quorum."""
    sites = names(count)
    local = run(sites, least=3)
    attempt = local.begin(0, 0, sites)
    uploads = masked(local, attempt, {s: drawn(4, i) for i, s in enumerate(sites)})
    victim, others, least = sites[0], sites[1:], attempt.plan.least_in_sum
    lists = {victim: [sorted([victim, *others][:least])]}
    for i, holder in enumerate(others):
        lists[holder] = [sorted([victim, *(others[(i + j) % len(others)] for j in range(least - 1))])]
    assert opens(local, attempt, uploads, lists) == {}


def test_a_sum_with_more_silent_sites_than_may_be_is_not_signed():
    """Seven sites of whom five agree to a sum: two may be missing, not three."""
    sites = names(7)
    local = run(sites, least=3)
    attempt = local.begin(0, 0, sites)
    masked(local, attempt, {s: drawn(4, i) for i, s in enumerate(sites)})
    with pytest.raises(PolicyError, match="at least 5 sites in a sum, found 4"):
        local.sites["s00"].agree(agree_request(attempt.plan, sites[:4]))
    local.sites["s00"].agree(agree_request(attempt.plan, sites[:5]))
