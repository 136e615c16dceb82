"""A server that lies about who is in a sum: what holders open for it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto, shamir
from fedveil.federation.secagg import site as module
from fedveil.federation.secagg.membership import EncryptedShares, PrekeyBundle, RoundPrekey
from fedveil.federation.secagg.pairwise_keys import mask_purpose, seed_purpose
from fedveil.federation.secagg.site import SiteRequirements
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import (
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


def test_a_site_notes_so_many_keys_in_a_run_and_opens_no_more(round_of_six, monkeypatch):
    """A server that makes up members would have it keep as many as it likes."""
    local, attempt, uploads = round_of_six
    asked = question(attempt.plan, attempt, SITES[0], SITES, uploads)
    monkeypatch.setattr(module, "MOST_SITES", 5)
    with pytest.raises(PolicyError, match="at most 5 keys in a run, found more"):
        local.sites[SITES[0]].unmask(asked)
    assert local.sites[SITES[0]].store.load().answered == {}
    monkeypatch.setattr(module, "MOST_SITES", 6)
    assert len(local.sites[SITES[0]].unmask(asked).heard) == 6


def test_a_prekey_that_is_opened_opens_no_share_of_the_sites_own_mask(round_of_six):
    """A site that is called silent though it has uploaded: late, or because the server lies. Its prekey is rebuilt from
    the others' shares; its own mask must still hide its vector."""
    local, attempt, uploads = round_of_six
    victim, others = SITES[0], SITES[1:]
    _, silent = answers(local, attempt, uploads, [(holder, others) for holder in others])
    private = crypto.private_key_from(combined(attempt, victim, silent[victim]))
    assert crypto.public_key_of(private).hex() == attempt.bundles[victim].prekey.key
    plan, attached = attempt.plan, uploads[victim][1]
    for holder, closed in attached.shares.closed.items():
        public = bytes.fromhex(attempt.membership.by_name[holder].run_key)
        key = crypto.agree_secret(private, public, mask_purpose(plan, victim, holder), bytes.fromhex(plan.digest))
        with pytest.raises(WireError):
            crypto.decrypt_share(key, bytes.fromhex(closed), mask_purpose(plan, victim, holder))


def test_one_holder_answers_one_list_of_a_plan_even_where_the_lists_share_no_site(round_of_six):
    """Else three questions, each with three sites in the sum, open one site's mask and the prekeys of all others."""
    local, attempt, uploads = round_of_six
    victim, holder = SITES[0], SITES[1]
    whole = question(attempt.plan, attempt, holder, SITES[:5], uploads)
    with pytest.raises(PolicyError, match="each site whose share it holds"):
        local.sites[holder].unmask(changed(whole, heard={victim: whole.heard[victim]}, silent={}))
    with pytest.raises(PolicyError, match="each site whose share it holds"):
        local.sites[holder].unmask(changed(whole, heard={}))


def test_one_holder_is_asked_for_the_same_halves_with_another_list(round_of_six):
    """A share that the sites of the sum are not all asked for may not be asked again under another sum."""
    local, attempt, uploads = round_of_six
    holder = local.sites[SITES[1]]
    whole = question(attempt.plan, attempt, SITES[1], SITES, uploads)
    first = holder.unmask(whole)
    assert holder.unmask(whole) == first  # the very same question, as after a lost answer
    with pytest.raises(PolicyError, match="never opens both halves"):
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
    private, closed = crypto.private_key_from(seed), {}
    for holder, share in zip(SITES, shamir.split_secret(seed, 5, 6), strict=True):
        purpose = seed_purpose(membership, liar, 0, holder)
        shared = crypto.agree_secret(private, bytes.fromhex(membership.by_name[holder].run_key), purpose)
        closed[holder] = crypto.encrypt_share(shared, share, purpose).hex()
    shares = EncryptedShares(closed=closed, digests=dict.fromkeys(closed, "00" * 16))
    prekey = RoundPrekey(
        site=liar, number=0, key=crypto.public_key_of(private).hex(), shares=shares.digest, signature="0" * 128
    )
    coordinator.keep(liar, PrekeyBundle(prekey=signed(prekey, key, prekey.text(membership.digest)), shares=shares))
    attempt = coordinator.attempt(0, 0, SITES)
    uploads = masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES[:5])})
    opened = local.sites[SITES[1]].unmask(question(attempt.plan, attempt, SITES[1], SITES[:5], uploads))
    assert liar not in opened.silent


def test_each_site_of_the_sum_is_asked_as_what_it_is(round_of_six):
    """Refused before a share is opened; then the right question still gets its answer."""
    local, attempt, uploads = round_of_six
    holder = local.sites[SITES[1]]
    whole = question(attempt.plan, attempt, SITES[1], SITES[:5], uploads)
    silent, heard = whole.silent[SITES[5]], whole.heard[SITES[0]]
    for lie in (
        changed(whole, silent=whole.silent | {SITES[0]: attempt.bundles[SITES[0]].shares.closed[SITES[1]]}),
        changed(whole, heard=whole.heard | {SITES[5]: uploads[SITES[5]][1].shares.closed[SITES[1]]}),
        changed(whole, heard=whole.heard | {SITES[5]: silent}, silent={}),
        changed(whole, in_sum=SITES),
        changed(whole, in_sum=[*SITES[:5], "s99"]),
        changed(whole, in_sum=[*SITES[:5], SITES[0]]),
        changed(whole, heard=whole.heard | {"s99": heard}),
        changed(whole, in_sum=SITES[:1], heard={SITES[0]: heard}),
        changed(whole, in_sum=[], heard={}, silent=dict.fromkeys(SITES, silent)),
        changed(whole, plan=whole.plan.model_dump() | {"run": "another"}),
        changed(whole, plan=whole.plan.model_dump() | {"membership": "0" * 64}),
    ):
        with pytest.raises(PolicyError):
            holder.unmask(lie)
    assert holder.store.load().answered == {}
    assert holder.unmask(whole).heard.keys() == set(SITES[:5])


@pytest.mark.parametrize(("plan_least", "own_least", "sites"), [(4, 2, 3), (2, 4, 3), (1, 0, 1)])
def test_a_sum_of_fewer_sites_than_the_plans_least_or_the_sites_own(plan_least, own_least, sites):
    local = run(SITES, SiteRequirements(min_cohort=own_least), least=plan_least)
    local.sites |= {
        n: replace(s, demands=SiteRequirements(min_cohort=min(own_least, 4))) for n, s in local.sites.items()
    }
    attempt = local.begin(0, 0, SITES)
    asked = question(attempt.plan, attempt, "s05", SITES[:sites], _masked_by_force(local, attempt, SITES[:sites]))
    with pytest.raises(PolicyError, match=f"at least {max(plan_least, own_least, 2)} sites"):
        local.sites["s05"].unmask(asked)


def _masked_by_force(local, attempt, sites):
    """Uploads of sites that demand nothing."""
    careless = {n: replace(s, demands=SiteRequirements(min_cohort=0)) for n, s in local.sites.items()}
    plan = changed(attempt.plan, least=max(2, attempt.plan.least))
    uploads = {}
    for i, site in enumerate(sites):
        vector = drawn(5, i)
        uploads[site] = (vector, careless[site].mask(plan, vector))
    return uploads


def test_a_site_that_has_masked_and_is_called_silent(round_of_six):
    local, attempt, uploads = round_of_six
    with pytest.raises(PolicyError, match="but is listed as silent"):
        local.sites["s05"].unmask(question(attempt.plan, attempt, "s05", SITES[:5], uploads))
    assert local.sites["s05"].unmask(question(attempt.plan, attempt, "s05", SITES, uploads)).silent == {}


def test_a_site_that_never_masked_may_be_called_silent_and_opens_its_own_share_too():
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    uploads = masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES[:5])})
    opened = local.sites["s05"].unmask(question(attempt.plan, attempt, "s05", SITES[:5], uploads))
    assert opened.silent.keys() == {"s05"}


@pytest.mark.parametrize("change", [{"attempt": 1}, {"round": 7}, {"bound": 1.0}, {"least": 3}])
@pytest.mark.parametrize("first", ["heard", "silent"])
def test_the_same_prekeys_in_another_plan(round_of_six, change, first):
    """The other half of what was answered for the first plan, asked for under the second one."""
    local, attempt, uploads = round_of_six
    holder, victim, rest = local.sites[SITES[1]], SITES[0], SITES[1:]
    heard = question(attempt.plan, attempt, SITES[1], SITES, uploads)
    other = question(changed(attempt.plan, **change), attempt, SITES[1], rest, uploads)
    silent = changed(other, heard={s: heard.heard[s] for s in other.heard})
    asked = (heard, silent) if first == "heard" else (question(attempt.plan, attempt, SITES[1], rest, uploads), heard)
    assert victim in asked[0].heard or victim in asked[0].silent
    holder.unmask(asked[0])
    with pytest.raises(PolicyError, match="never opens both halves"):
        holder.unmask(asked[1])


def test_a_plan_older_than_the_last_one_answered(round_of_six):
    local, old, old_uploads = round_of_six
    for site, (_, attached) in old_uploads.items():
        local.coordinator.keep(site, attached.next)
    new = local.coordinator.attempt(1, 0, SITES)
    uploads = masked(local, new, {s: drawn(5, i) for i, s in enumerate(SITES)})
    local.sites["s01"].unmask(question(new.plan, new, "s01", SITES, uploads))
    with pytest.raises(PolicyError, match="never opens both halves"):
        local.sites["s01"].unmask(question(old.plan, old, "s01", SITES, old_uploads))


@pytest.mark.parametrize("lost", [None, "s00", "s01"])
def test_an_old_membership_that_is_joined_again(round_of_six, lost):
    """The server has a new one joined, asks for the halves of the old one again; also after a site lost its keys."""
    local, old, uploads = round_of_six
    coordinator, old_setup = local.coordinator, local.coordinator.settle_on(SITES)
    holder = local.sites["s01"]
    holder.unmask(question(old.plan, old, "s01", SITES, uploads))
    if lost:
        local.sites[lost].store._kept = None
        coordinator.admit(lost, local.sites[lost].hello(coordinator.hello()))
    else:
        coordinator.forget("s05")
    new = coordinator.settle_on(SITES)
    assert new.membership != old_setup.membership
    for site in local.sites.values():
        if site.name in new.membership.by_name:
            site.join(new)
    silent = question(old.plan, old, "s01", SITES[1:], uploads)
    with pytest.raises(PolicyError, match="membership that this site joined last"):
        holder.unmask(silent)
    if lost == "s01":  # its old run key is gone, and what was closed to it with it
        with pytest.raises(PolicyError, match="own run key"):
            holder.join(old_setup)
        return
    holder.join(old_setup)
    with pytest.raises(PolicyError, match="never opens both halves"):
        holder.unmask(silent)


def test_a_share_closed_to_another_holder_or_for_another_site_or_context_is_left_out(round_of_six, caplog):
    local, attempt, uploads = round_of_six
    whole = question(attempt.plan, attempt, "s01", SITES[:5], uploads)
    attached = uploads["s00"][1]
    for lie in (
        changed(whole, heard=whole.heard | {"s00": attached.shares.closed["s02"]}),
        changed(whole, heard=whole.heard | {"s00": whole.heard["s02"]}),
        changed(whole, heard=whole.heard | {"s00": attached.next.shares.closed["s01"]}),
        changed(whole, heard=whole.heard | {"s00": attempt.bundles["s00"].shares.closed["s01"]}),
        changed(whole, silent={"s05": uploads["s05"][1].shares.closed["s01"]}),
        changed(whole, silent={"s05": uploads["s05"][1].next.shares.closed["s01"]}),
        changed(whole, plan=changed(whole.plan, attempt=1).model_dump()),
    ):
        before = local.sites["s01"].store.load()
        opened = local.sites["s01"].unmask(lie)
        local.sites["s01"].store.save(before)  # as if it had not answered
        assert len(opened.heard) + len(opened.silent) < 6
        assert "expected one for this holder and context, found another; it is left out" in caplog.text
        caplog.clear()


def test_a_prekey_that_its_owner_did_not_sign(round_of_six):
    """Such as one with a later number, so that an answer seems to be older."""
    local, attempt, uploads = round_of_six
    forged = changed(attempt.plan.prekey_of("s00"), number=99)
    plan = changed(attempt.plan, prekeys=[forged.model_dump(), *(p.model_dump() for p in attempt.plan.prekeys[1:])])
    with pytest.raises(WireError, match="prekey of s00"):
        local.sites["s01"].unmask(question(plan, attempt, "s01", SITES[:5], uploads))


def test_what_was_answered_is_kept_before_it_leaves(round_of_six):
    local, attempt, uploads = round_of_six

    class Full(MemorySecAggStore):
        def save(self, kept):
            raise OSError("a full disk")

    store = Full()
    store._kept = local.sites["s01"].store.load()
    with pytest.raises(OSError, match="full disk"):
        replace(local.sites["s01"], store=store).unmask(question(attempt.plan, attempt, "s01", SITES, uploads))


def test_a_holder_outside_of_the_cohort_opens_its_shares_too():
    local = run(SITES)
    attempt = local.begin(0, 0, SITES[:4])
    uploads = masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES[:3])})
    opened = local.sites["s05"].unmask(question(attempt.plan, attempt, "s05", SITES[:3], uploads))
    assert (opened.heard.keys(), opened.silent.keys()) == (set(SITES[:3]), {"s03"})
