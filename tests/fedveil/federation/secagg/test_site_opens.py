"""A server that lies about who is in a sum: what sites sign and open for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto, derivations, shamir
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import (
    add,
    agree_request,
    agreed,
    changed,
    drawn,
    masked,
    names,
    open_request,
    run,
)  # fmt: skip

SITES = names(6)


@pytest.fixture
def round_of_six():
    """All six have masked. q = t = 5."""
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    return local, attempt, masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES)})


def phase_of(local, site: str) -> str:
    return local.sites[site].store.load().live.phase


def answer_of(site, ask: str, plan, uploads):
    """What a site answers if it is asked to sign the whole cohort's list, or to open its shares for it."""
    if ask == "agree":
        return site.agree(agree_request(plan, SITES))
    return site.open(open_request(plan, site.name, SITES, uploads))


def test_a_pair_secret_that_is_opened_opens_no_row_and_no_own_mask(round_of_six):
    """A site that is called silent though it has uploaded: late, or because the server lies. The secrets of its pairs
    are rebuilt from the others' shares; its own mask must still hide its vector."""
    local, attempt, uploads = round_of_six
    plan, victim, others = attempt.plan, SITES[0], SITES[1:]
    signatures = agreed(local, plan, others)
    answers = {h: local.sites[h].open(open_request(plan, h, others, uploads, signatures)) for h in others}
    pairs = {
        site: shamir.combine_shares(
            {plan.place(site, h): bytes.fromhex(a.pairs[site][victim]) for h, a in answers.items()}
        )
        for site in others
    }
    for site, secret in pairs.items():
        assert derivations.pair_secret_digest(secret, plan.digest, site, victim) == uploads[victim][1].pairs[site]
        assert all(victim not in answer.own for answer in answers.values())
        for holder, row in uploads[victim][1].rows.items():
            key = crypto.derive_key(
                secret, derivations.protocol_context("row", victim, holder), bytes.fromhex(plan.digest)
            )
            with pytest.raises(WireError):
                derivations.decrypt_row(key, row, 6, plan.digest, victim, holder)


def test_a_site_signs_and_opens_one_list_of_a_plan(round_of_six):
    local, attempt, uploads = round_of_six
    plan, site, others = attempt.plan, local.sites["s01"], SITES[:5]
    first = site.agree(agree_request(plan, others))
    assert site.agree(agree_request(plan, others)) == first  # the same again, as after a lost answer
    for other in (SITES, [*SITES[:4], SITES[5]]):
        with pytest.raises(PolicyError, match="another list for this plan"):
            site.agree(agree_request(plan, other))
        with pytest.raises(PolicyError, match="another list for this plan"):
            site.open(open_request(plan, "s01", other, uploads))
    signatures = agreed(local, plan, others)
    wanted = open_request(plan, "s01", others, uploads, signatures)
    opened = site.open(wanted)
    assert site.open(wanted) == opened
    assert site.agree(agree_request(plan, others)) == first
    for ask in (
        lambda: site.agree(agree_request(plan, SITES)),
        lambda: site.open(open_request(plan, "s01", SITES, uploads)),
    ):
        with pytest.raises(PolicyError, match="another list for this plan"):
            ask()


def test_to_open_is_to_sign(round_of_six):
    local, attempt, uploads = round_of_six
    plan, site = attempt.plan, local.sites["s01"]
    opened = site.open(open_request(plan, "s01", SITES, uploads))
    assert opened.own.keys() == set(SITES)
    assert opened.pairs == {}
    with pytest.raises(PolicyError, match="another list for this plan"):
        site.agree(agree_request(plan, SITES[:5]))
    site.agree(agree_request(plan, SITES))


def test_each_site_of_the_sum_is_asked_for_as_what_it_is(round_of_six):
    """Refused before a share is opened; then the right request still gets its answer."""
    local, attempt, uploads = round_of_six
    plan, holder = attempt.plan, local.sites[SITES[1]]
    signatures = agreed(local, plan, SITES[:5])
    whole = open_request(plan, SITES[1], SITES[:5], uploads, signatures)
    row = uploads[SITES[5]][1].rows[SITES[1]]
    for lie in (
        changed(whole, rows=whole.rows | {SITES[5]: row}),
        changed(whole, rows=whole.rows | {"s99": row}),
        changed(whole, rows={}),
        changed(whole, rows={SITES[0]: whole.rows[SITES[0]]}),
        changed(whole, in_sum=SITES),
        changed(whole, in_sum=[*SITES[:5], "s99"]),
        changed(whole, in_sum=SITES[:1], rows={SITES[0]: whole.rows[SITES[0]]}),
        changed(whole, in_sum=[], rows={}),
        changed(whole, plan=whole.plan.model_dump() | {"run": "another"}),
        changed(whole, plan=whole.plan.model_dump() | {"attempt": 1}),
        changed(whole, agreed=dict(list(signatures.items())[:4])),
    ):
        with pytest.raises(PolicyError):
            holder.open(lie)
    assert phase_of(local, SITES[1]) == "signed"
    assert holder.open(whole).own.keys() == set(SITES[:5])


@pytest.mark.parametrize(
    "in_sum", [[*SITES[:5], SITES[0]], [*SITES[:5], "s99"], SITES[2:], SITES[1:5], []], ids=lambda s: ",".join(s)
)
def test_a_list_of_others_or_too_few_is_not_signed(round_of_six, in_sum):
    local, attempt, uploads = round_of_six
    asked = agree_request(attempt.plan, in_sum)
    with pytest.raises(PolicyError, match="the list must contain this site|expected at least 5 sites in a sum"):
        local.sites["s01" if "s01" in in_sum else "s00"].agree(asked)
    with pytest.raises(PolicyError):
        local.sites["s00"].open(open_request(attempt.plan, "s00", in_sum, uploads))
    assert phase_of(local, "s00") == "masked"


@pytest.mark.parametrize(("plan_least", "own_least", "sites"), [(6, 2, 5), (2, 6, 5), (2, 2, 4)])
def test_a_sum_of_fewer_sites_than_the_plans_least_or_the_sites_own(plan_least, own_least, sites):
    local = run(SITES, least=plan_least)
    attempt = local.begin(0, 0, SITES)
    masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES)})
    site = replace(local.sites["s00"], demands=SiteRequirements(min_cohort=own_least))
    with pytest.raises(PolicyError, match=f"at least {max(plan_least, own_least, 5)} sites in a sum"):
        site.agree(agree_request(attempt.plan, SITES[:sites]))


def test_a_site_that_has_masked_and_is_called_silent(round_of_six):
    local, attempt, uploads = round_of_six
    for ask in (
        lambda: local.sites["s05"].agree(agree_request(attempt.plan, SITES[:5])),
        lambda: local.sites["s05"].open(open_request(attempt.plan, "s05", SITES[:5], uploads)),
    ):
        with pytest.raises(PolicyError, match="the list must contain this site"):
            ask()
    assert phase_of(local, "s05") == "masked"


def test_a_site_that_never_masked_signs_and_opens_nothing():
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    uploads = masked(local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES[:5])})
    for in_sum in (SITES, SITES[:5]):
        with pytest.raises(PolicyError, match="the plan for which this site last masked"):
            local.sites["s05"].agree(agree_request(attempt.plan, in_sum))
        with pytest.raises(PolicyError, match="the plan for which this site last masked"):
            local.sites["s05"].open(open_request(attempt.plan, "s05", in_sum, uploads))


@pytest.mark.parametrize("change", [{"attempt": 1}, {"round": 7}, {"bound": 1.0}, {"least": 3}])
def test_the_same_prekeys_in_another_plan(round_of_six, change):
    local, attempt, uploads = round_of_six
    other = changed(attempt.plan, **change)
    for ask in (
        lambda: local.sites["s01"].agree(agree_request(other, SITES)),
        lambda: local.sites["s01"].open(open_request(other, "s01", SITES, uploads)),
    ):
        with pytest.raises(PolicyError, match="this is not the plan .* no share is opened"):
            ask()


def next_attempt(local, attempt, uploads, round_: int, number: int):
    """The next attempt, with the prekeys that came with the uploads."""
    for site, (_, attached) in uploads.items():
        local.coordinator.keep(site, attempt.plan, attached.next)
    return local.coordinator.attempt(round_, number, SITES, broadcast="")


def test_a_plan_older_than_the_last_one_masked_for(round_of_six):
    local, old, old_uploads = round_of_six
    new = next_attempt(local, old, old_uploads, 1, 0)
    uploads = masked(local, new, {s: drawn(5, i) for i, s in enumerate(SITES)})
    with pytest.raises(PolicyError, match="this is not the plan .* no share is opened"):
        local.sites["s01"].open(open_request(old.plan, "s01", SITES, old_uploads))
    assert local.sites["s01"].open(open_request(new.plan, "s01", SITES, uploads)).own.keys() == set(SITES)


def test_who_has_agreed_to_a_sum_of_a_round_masks_no_more_in_it(round_of_six):
    local, attempt, uploads = round_of_six
    local.sites["s01"].agree(agree_request(attempt.plan, SITES[:5]))
    second = next_attempt(local, attempt, uploads, 0, 1)
    terms = local.terms(second.plan)
    with pytest.raises(PolicyError, match="this site agreed to a sum in round 0"):
        local.sites["s01"].mask(second.plan, terms, drawn(5, 1))
    local.sites["s02"].mask(second.plan, terms, drawn(5, 1))  # it has signed nothing
    assert local.sites["s01"].ready(local.coordinator.request()).signed == 0


def test_a_row_of_another_holder_dealer_or_plan_is_left_out(round_of_six, caplog):
    local, attempt, uploads = round_of_six
    whole = open_request(attempt.plan, "s01", SITES, uploads)
    second = next_attempt(local, attempt, uploads, 0, 1)
    attached = uploads["s00"][1]
    before = local.sites["s01"].store.load()
    of_second = masked(local, second, {"s00": drawn(5, 0)})["s00"][1]
    for row in (
        attached.rows["s02"],
        whole.rows["s02"],
        of_second.rows["s01"],
        attached.rows["s01"][:-32],
        attached.rows["s01"][:-2] + ("00" if attached.rows["s01"][-2:] != "00" else "01"),
    ):
        opened = local.sites["s01"].open(changed(whole, rows=whole.rows | {"s00": row}))
        local.sites["s01"].store.save(before)  # as if it had not answered
        assert opened.unread == ("s00",)
        assert opened.own.keys() == set(SITES[1:])
        assert "it is left out" in caplog.text
        caplog.clear()


def test_shares_are_of_the_silent_partners_of_each_site_alone(round_of_six):
    local, attempt, uploads = round_of_six
    plan, others = attempt.plan, SITES[:5]
    opened = local.sites["s01"].open(open_request(plan, "s01", others, uploads, agreed(local, plan, others)))
    assert opened.own.keys() == set(others)
    assert opened.pairs.keys() == set(others)
    assert all(of.keys() == {"s05"} for of in opened.pairs.values())
    assert opened.unread == ()


@pytest.mark.parametrize("lie", ["too few", "another list", "two names", "no quorum in the list", "wrong bytes"])
def test_signatures_that_are_no_certificate(round_of_six, lie):
    """q = 5. Signatures of sites that are not in the list, or do not verify, do not count."""
    local, attempt, uploads = round_of_six
    plan, others = attempt.plan, SITES[:5]
    signatures = agreed(local, plan, others)
    wrong = {
        "too few": {s: signatures[s] for s in others[:4]},
        "another list": dict(signatures, s04=local.sites["s05"].agree(agree_request(plan, SITES)).signature),
        "two names": dict(signatures, s04=signatures["s03"]),
        "no quorum in the list": {**{s: signatures[s] for s in others[:4]}, "s05": signatures["s04"]},
        "wrong bytes": dict(signatures, s04="0" * 128),
    }[lie]
    with pytest.raises(PolicyError, match="expected 5 sites' signatures of this list, found 4"):
        local.sites["s00"].open(open_request(plan, "s00", others, uploads, wrong))
    assert phase_of(local, "s00") == "signed"
    assert local.sites["s00"].open(open_request(plan, "s00", others, uploads, signatures)).own.keys() == set(others)


@pytest.mark.parametrize("ask", ["agree", "open"])
def test_what_was_agreed_or_opened_is_kept_before_it_leaves(round_of_six, ask):
    local, attempt, uploads = round_of_six

    class Full(MemorySecAggStore):
        def save(self, kept):
            raise OSError("a full disk")

    store = Full()
    store._kept = local.sites["s01"].store.load()
    site = replace(local.sites["s01"], store=store)
    with pytest.raises(OSError, match="full disk"):
        answer_of(site, ask, attempt.plan, uploads)


def test_after_opening_no_key_of_the_plan_is_left_at_the_site(round_of_six):
    local, attempt, uploads = round_of_six
    add(attempt, uploads)
    rows = local.sites["s01"].store.load().live.rows
    local.unmask(attempt)
    for site in local.sites.values():
        live = site.store.load().live
        assert (live.phase, live.rows) == ("opened", {})
        assert not any(key in site.store.load().to_bytes().decode() for key in rows.values())


@pytest.mark.parametrize("ask", ["agree", "open"])
def test_a_plan_of_another_boot_of_the_machine_is_dropped(round_of_six, ask):
    """The state may be an older copy: what it signed since is not in it."""
    local, attempt, uploads = round_of_six
    again = replace(local.sites["s01"], boot=lambda: "another")
    with pytest.raises(PolicyError, match="the plan for which this site last masked"):
        answer_of(again, ask, attempt.plan, uploads)
    state = again.store.load()
    assert state.live is None
    assert state.fence.masked == (0, 0)
