"""A server that lies about who is in a sum: what holders open for it."""

from __future__ import annotations

import os

import pytest

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secure import keys, shamir
from fedveil.federation.secure.site import mask_purpose, seed_purpose
from fedveil.federation.secure.statements import Bundle, Prekey, Shares
from tests.fedveil.federation.secure.sites import (
    changed,
    combined,
    drawn,
    masked,
    names,
    question,
    run,
    signed,
)  # fmt: skip

SITES = names(6)


@pytest.fixture
def round_of_six():
    """All six have uploaded. t = 5."""
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    return local, attempt, masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES)})


def answers(local, attempt, uploads, lists):
    """Every holder's shares, if it is told that its own list is in the sum; those that refuse are left out."""
    heard, silent = {}, {}
    for holder, in_sum in lists:
        try:
            opened = local.sites[holder].unmask(question(attempt.plan, attempt, holder, in_sum, uploads))
        except PolicyError:
            continue
        for site, share in opened.heard.items():
            heard.setdefault(site, {})[holder] = share
        for site, share in opened.silent.items():
            silent.setdefault(site, {})[holder] = share
    return heard, silent


def test_a_prekey_that_is_opened_opens_no_share_of_the_sites_own_mask(round_of_six):
    """A site that is called silent though it has uploaded: late, or because the server lies. Its prekey is rebuilt from
    the others' shares; its own mask must still hide its vector."""
    local, attempt, uploads = round_of_six
    victim, others = SITES[0], SITES[1:]
    _, silent = answers(local, attempt, uploads, [(holder, others) for holder in others])
    private = keys.private_of(combined(attempt, victim, silent[victim]))
    assert keys.public_of(private).hex() == attempt.bundles[victim].prekey.key
    plan, attached = attempt.plan, uploads[victim][1]
    for holder, closed in attached.shares.closed.items():
        public = bytes.fromhex(attempt.membership.by_name[holder].run_key)
        key = keys.agreed(private, public, mask_purpose(plan, victim, holder), bytes.fromhex(plan.digest))
        with pytest.raises(WireError):
            keys.opened(key, bytes.fromhex(closed), mask_purpose(plan, victim, holder))


def test_one_holder_answers_one_list_of_a_plan_even_where_the_lists_share_no_site(round_of_six):
    """Else three questions, each with three sites in the sum, open one site's mask and the prekeys of all others."""
    local, attempt, uploads = round_of_six
    victim, holder = SITES[0], SITES[1]
    whole = question(attempt.plan, attempt, holder, SITES[:3], uploads)
    with pytest.raises(PolicyError, match="each site that it holds a share of"):
        local.sites[holder].unmask(changed(whole, heard={victim: whole.heard[victim]}, silent={}))
    with pytest.raises(PolicyError, match="each site that it holds a share of"):
        local.sites[holder].unmask(changed(whole, heard={}))


def test_one_holder_is_asked_for_the_same_halves_with_another_list(round_of_six):
    """A share that the sites of the sum are not all asked for may not be asked again under another sum."""
    local, attempt, uploads = round_of_six
    holder = local.sites[SITES[1]]
    whole = question(attempt.plan, attempt, SITES[1], SITES, uploads)
    first = holder.unmask(whole)
    assert holder.unmask(whole) == first  # the very same question, as after a lost answer
    with pytest.raises(PolicyError, match="never both halves"):
        holder.unmask(question(attempt.plan, attempt, SITES[1], SITES[:-1], uploads))


def test_a_site_under_anothers_run_key_has_no_share_opened(round_of_six):
    """It works with the server and names another's run key as its own: what a holder has answered is kept by run key,
    and must not be forgotten for an answer about the liar."""
    local, liar, victim = run(SITES), SITES[5], SITES[0]
    coordinator, key = local.coordinator, local.sites[liar].signing_key
    for name, site in local.sites.items():
        coordinator.admit(name, site.hello(coordinator.hello()))
    copied = changed(coordinator.members[liar], run_key=coordinator.members[victim].run_key)
    coordinator.members[liar] = signed(copied, key, copied.text(coordinator.run))
    setup = coordinator.settle_on(SITES)
    for name in SITES[:5]:
        coordinator.keep(name, local.sites[name].join(setup))
    membership, seed = setup.membership, os.urandom(16)
    private, closed = keys.private_of(seed), {}
    for holder, share in zip(SITES, shamir.split(seed, 5, 6), strict=True):
        purpose = seed_purpose(membership, liar, 0, holder)
        shared = keys.agreed(private, bytes.fromhex(membership.by_name[holder].run_key), purpose)
        closed[holder] = keys.closed(shared, share, purpose).hex()
    shares = Shares(closed=closed)
    prekey = Prekey(
        site=liar, number=0, key=keys.public_of(private).hex(), shares=shares.digest, signature="0" * 128
    )
    coordinator.keep(liar, Bundle(prekey=signed(prekey, key, prekey.text(membership.digest)), shares=shares))
    attempt = coordinator.attempt(0, 0, SITES)
    uploads = masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES[:5])})
    with pytest.raises(WireError, match="share"):
        local.sites[SITES[1]].unmask(question(attempt.plan, attempt, SITES[1], SITES[:5], uploads))
