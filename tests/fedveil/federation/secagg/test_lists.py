"""A server that tells different holders different sums, with and without sites that work with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import PolicyError
from fedveil.federation.secagg import crypto, mask_streams
from fedveil.federation.secagg.pairwise_keys import mask_partners, negate_mask, pairwise_mask, self_mask
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import combined, drawn, masked, names, question, run


def opened_by(local, attempt, uploads, lists, colluding=()):
    """Shares that the holders open: each honest one is asked its own lists in turn, a colluding one answers all."""
    heard, silent = {}, {}
    for holder, sums in lists.items():
        site = local.sites[holder]
        site_state = site.store.load()
        for in_sum in sums:
            if holder in colluding:  # it forgets what it has answered, and that it has masked
                store = MemorySecAggStore()
                store.save(site_state.model_copy(update={"answered": {}, "prekeys": 0, "seed": ""}))
                site = replace(site, store=store)
            try:
                opened = site.unmask(question(attempt.plan, attempt, holder, in_sum, uploads))
            except PolicyError:
                continue
            for opened_shares, shares in ((heard, opened.heard), (silent, opened.silent)):
                for of, share in shares.items():
                    opened_shares.setdefault(of, {})[holder] = share
    return heard, silent


def both_halves(local, attempt, uploads, lists, victim, colluding=()) -> tuple[bool, bool]:
    """Whether the server can rebuild the secret of the victim's own mask, and its prekey."""
    heard, silent = opened_by(local, attempt, uploads, lists, colluding)
    t = attempt.membership.threshold
    return len(heard.get(victim, {})) >= t, len(silent.get(victim, {})) >= t


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(count=st.integers(4, 8), data=st.data())
def test_at_more_than_two_thirds_no_split_of_the_holders_opens_both_halves(count, data):
    """The victim itself never says that it was silent; fewer than a third of the holders work with the server."""
    sites = names(count)
    local = run(sites)
    attempt = local.begin(0, 0, sites)
    assert attempt.membership.threshold == 2 * count // 3 + 1
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites)})
    victim, rest = sites[0], sites[1:]
    colluding = data.draw(st.permutations(rest))[: data.draw(st.integers(0, (count - 1) // 3))]
    first = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    both = data.draw(st.booleans())
    lists = {}
    for holder, says in zip(sites, first, strict=True):
        order = [sites, rest] if says or holder == victim else [rest, sites]
        lists[holder] = order if both or holder in colluding else order[:1]
    assert both_halves(local, attempt, uploads, lists, victim, colluding) != (True, True)


@pytest.mark.parametrize(("count", "threshold", "colluding"), [(6, 3, 0), (8, 4, 0), (7, 4, 1), (9, 5, 1)])
def test_control_at_half_of_the_holders_a_split_opens_both(count, threshold, colluding, monkeypatch):
    """Of 6 and 8 half the holders, which no site permits; of 7 and 9 above half, where one site works with the server:
    2 t > N + c fails."""
    monkeypatch.setattr(SecAggSite, "_require_threshold", lambda self, membership: None)
    sites = names(count)
    local = run(sites, threshold=threshold)
    attempt = local.begin(0, 0, sites)
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites)})
    victim, rest, liars = sites[0], sites[1:], sites[count - colluding :]
    lists = {s: [sites] if i % 2 == 0 else [rest] for i, s in enumerate(sites)} | {s: [sites, rest] for s in liars}
    assert both_halves(local, attempt, uploads, lists, victim, liars) == (True, True)
    monkeypatch.undo()
    if 2 * threshold <= count:
        with pytest.raises(PolicyError, match="secure.threshold"):
            local.sites[victim].join(local.coordinator.settle_on(sites))


def alone(local, attempt, uploads, victim, least):
    """The victim's vector, if holders that are told different sums open enough; else None.

    Each sum has `least` sites, the victim and the holder itself among them.
    """
    others = [s for s in local.sites if s != victim]
    lists = {victim: [[victim, *others][:least]]}
    for i, holder in enumerate(others):
        lists[holder] = [[victim, *(others[(i + j) % len(others)] for j in range(least - 1))]]
    heard, silent = opened_by(local, attempt, uploads, lists)
    t, plan = attempt.membership.threshold, attempt.plan
    if len(heard.get(victim, {})) < t or any(len(silent.get(s, {})) < t for s in others):
        return None
    vector = uploads[victim][0].copy()
    off = [negate_mask(self_mask(combined(attempt, victim, heard[victim]), plan, victim))]
    for prekey in mask_partners(plan, attempt.membership, victim):
        private = crypto.private_key_from(combined(attempt, prekey.site, silent[prekey.site]))
        off.append(pairwise_mask(plan, prekey.site, victim, private, bytes.fromhex(plan.prekey_of(victim).key)))
    mask_streams.add_masks(vector, off)
    return vector


@pytest.mark.parametrize("count", [10, 16])
def test_no_choice_of_lists_leaves_one_site_alone(count):
    """Each holder sees a sum of three sites with itself in it, and each of the others is missing in t of the lists."""
    sites = names(count)
    local = run(sites, least=3)
    attempt = local.begin(0, 0, sites)
    vectors = {s: drawn(4, i) for i, s in enumerate(sites)}
    uploads = masked(local, attempt, vectors)
    recovered_vector = alone(local, attempt, uploads, sites[0], 3)
    assert recovered_vector is None or not np.array_equal(recovered_vector, vectors[sites[0]])


def test_a_sum_with_more_silent_sites_than_holders_may_be_is_not_opened():
    """Seven holders of whom five open a secret: two may be missing, not three."""
    sites = names(7)
    local = run(sites, least=3)
    attempt = local.begin(0, 0, sites)
    uploads = masked(local, attempt, {s: drawn(4, i) for i, s in enumerate(sites)})
    with pytest.raises(PolicyError, match="at most 2 silent sites of 7, found 3"):
        local.sites["s00"].unmask(question(attempt.plan, attempt, "s00", sites[:4], uploads))
    assert local.sites["s00"].unmask(question(attempt.plan, attempt, "s00", sites[:5], uploads)).silent.keys() == {
        "s05", "s06",
    }  # fmt: skip
