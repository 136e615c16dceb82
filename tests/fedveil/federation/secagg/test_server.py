"""The server's half: what it takes of sites that lie, whom it names, and what it makes of shares that do not fit."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg import crypto, derivations, shamir
from fedveil.federation.secagg.messages import KeysResponse
from fedveil.federation.secagg.server import SecAggConfig, SecAggCoordinator
from tests.fedveil.federation.secagg.sites import (
    RUN,
    add,
    changed,
    drawn,
    masked,
    names,
    run,
    signed,
    signed_prekey,
    stranger,
    unmasked,
)  # fmt: skip

SITES = names(7)
LOW_ORDER = (
    bytes(32),
    bytes([1, *[0] * 31]),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
)


def sum_of(vectors) -> list[int]:
    return (sum(vectors.values()) & np.uint32(0xFFFFFFFF)).tolist()


def key_of(local, site: str) -> bytes:
    return local.sites[site].signing_key


def closed(local, attempt) -> None:
    """Closes the list, and has all of it sign."""
    attempt.close()
    for site, asked in attempt.agree_requests().items() if attempt.needs_agreement else ():
        attempt.take_agreement(site, local.sites[site].agree(asked))


def opened_with(local, attempt, lies=lambda holder, opened: opened) -> dict[str, str]:
    """Asks all of the list; `lies` says what one sends in place of its answer, which it signs. Returns what the server
    says of wrong ones."""
    closed(local, attempt)
    wrong = {}
    for holder, asked in attempt.open_requests().items():
        answer = signed(lies(holder, local.sites[holder].open(asked)), holder, key_of(local, holder))
        try:
            attempt.take_opening(holder, answer)
        except WireError as error:
            wrong[holder] = str(error)
    return wrong


@pytest.fixture
def round_of_seven():
    """All seven have prekeys; the first six upload. q = t = 5."""
    local = run(SITES, least=3)
    attempt = local.begin(0, 0, SITES)
    vectors = {s: drawn(9, i) for i, s in enumerate(SITES[:6])}
    uploads = masked(local, attempt, vectors)
    add(attempt, uploads)
    return local, attempt, vectors, uploads


# S4: uploads


def _without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        (lambda a, v: {"plan": "0" * 64}, "for a different plan"),
        (lambda a, v: {"pairs": _without(a.pairs, "s00")}, "exactly its holders"),
        (lambda a, v: {"pairs": a.pairs | {"s06": "0" * 64}}, "exactly its holders"),
        (lambda a, v: {"rows": _without(a.rows, "s06")}, "exactly its holders"),
        (lambda a, v: {"rows": a.rows | {"s99": a.rows["s00"]}}, "exactly its holders"),
        (lambda a, v: {"shares": _without(a.shares, "s03")}, "exactly its holders"),
        (lambda a, v: {"shares": a.shares | {"s03": a.shares["s03"][:-1]}}, "s06 must send 7 shares"),
        (lambda a, v: {"rows": a.rows | {"s03": a.rows["s03"] + "00" * 16}}, "s06 must send 7 shares"),
        (lambda a, v: {"rows": dict.fromkeys(a.rows, "00" * 44)}, "s06 must send 7 shares"),
        (lambda a, v: {"vector": "0" * 64}, "the vector does not have the digest that s06 signed"),
        (
            lambda a, v: {"vector": hashlib.sha256(v.tobytes()[4:]).hexdigest()},
            "the vector does not have the digest that s06 signed",
        ),
    ],
)
def test_an_upload_that_is_not_whole_is_refused_though_its_site_signed_it(round_of_seven, lie, match):
    local, attempt, vectors, _ = round_of_seven
    hidden, attached = masked(local, attempt, {"s06": drawn(9, 6)})["s06"]
    with pytest.raises(WireError, match=match):
        attempt.add("s06", hidden, signed(changed(attached, **lie(attached, hidden)), "s06", key_of(local, "s06")))
    assert "s06" not in attempt.uploads
    assert attempt.faulty == {}
    assert unmasked(local, attempt).tolist() == sum_of(vectors)


def test_an_upload_that_its_site_did_not_sign_is_refused(round_of_seven):
    local, attempt, _, _ = round_of_seven
    hidden, attached = masked(local, attempt, {"s06": drawn(9, 6)})["s06"]
    for forged in (
        changed(attached, own="0" * 64),
        changed(attached, signature="0" * 128),
        signed(attached, "s06", stranger()),
        signed(attached, "s05", key_of(local, "s06")),
        signed(attached, "s06", key_of(local, "s05")),
    ):
        with pytest.raises(
            WireError, match="the signature of s06 on its upload is invalid|upload of s06 is for a different plan"
        ):
            attempt.add("s06", hidden, forged)
    attempt.add("s06", hidden, attached)


def test_another_vector_than_the_signed_one_is_refused(round_of_seven):
    local, attempt, _, _ = round_of_seven
    hidden, attached = masked(local, attempt, {"s06": drawn(9, 6)})["s06"]
    for other in (hidden + np.uint32(1), hidden[:-1], hidden[::-1]):
        with pytest.raises(WireError, match="the vector does not have the digest that s06 signed"):
            attempt.add("s06", other, attached)
    attempt.add("s06", hidden, attached)


def test_an_upload_is_taken_once_in_time_and_of_the_cohort(round_of_seven):
    local, attempt, vectors, uploads = round_of_seven
    with pytest.raises(WireError, match="is late, repeated"):
        attempt.add("s00", *uploads["s00"])
    with pytest.raises(WireError, match="is late, repeated"):
        attempt.add("s99", *uploads["s00"])
    with pytest.raises(
        WireError, match="the signature of s06 on its upload is invalid|upload of s06 is for a different plan"
    ):
        attempt.add("s06", *uploads["s00"])
    late = masked(local, attempt, {"s06": drawn(9, 6)})
    attempt.close()
    with pytest.raises(WireError, match="is late, repeated, or of a site outside the plan"):
        add(attempt, late)
    attempt.in_sum = ()
    assert unmasked(local, attempt).tolist() == sum_of(vectors)


def test_the_prekey_of_a_late_upload_is_kept_all_the_same(round_of_seven):
    local, attempt, _, _ = round_of_seven
    _, attached = masked(local, attempt, {"s06": drawn(9, 6)})["s06"]
    local.coordinator.keep("s06", attempt.plan, attached.next)
    assert local.coordinator.ready["s06"] == KeysResponse(prekey=attached.next, after=(0, 0), signed=None)
    earlier = attempt.plan.by_name["s06"]
    for prekey in (earlier, signed_prekey(changed(earlier, key=attached.next.key), key_of(local, "s06"))):
        with pytest.raises(WireError, match="the next prekey of s06 is not later"):
            local.coordinator.keep("s06", attempt.plan, prekey)
    other = stranger()
    foreign = changed(attached.next, signing_key=crypto.verifying_key(other).hex())
    with pytest.raises(WireError, match="signed with its registered key"):
        local.coordinator.keep("s06", attempt.plan, signed_prekey(foreign, other))


# Disputes


def lying_pairs(local, attempt, site: str, others, vector):
    """An upload that names other secrets for its pairs with these sites."""
    hidden, attached = masked(local, attempt, {site: vector})[site]
    pairs = attached.pairs | dict.fromkeys(others, "0" * 64)
    return hidden, signed(changed(attached, pairs=pairs), site, key_of(local, site))


def test_a_site_in_dispute_with_more_than_may_collude_is_left_out_alone(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attempt.add("s06", *lying_pairs(local, attempt, "s06", SITES[:3], drawn(9, 6)))
    assert attempt.disputes == [("s00", "s06"), ("s01", "s06"), ("s02", "s06")]
    with pytest.raises(QuorumError, match="s00 and s06, s01 and s06, s02 and s06"):
        attempt.close()
    assert attempt.in_sum == ()
    assert attempt.faulty.keys() == {"s06"}
    assert "name different secrets" in attempt.faulty["s06"]
    assert all(local.sites[s].store.load().live.phase == "masked" for s in SITES)


def test_of_a_pair_in_dispute_both_are_left_out(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attempt.add("s06", *lying_pairs(local, attempt, "s06", ["s03"], drawn(9, 6)))
    assert attempt.disputes == [("s03", "s06")]
    assert attempt.faulty.keys() == {"s03", "s06"}


def test_a_liar_is_named_alone_and_the_pair_that_is_left_as_a_pair():
    local = run(SITES, least=3, colluding=1)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, 1) for s in SITES[:5]}))
    attempt.add("s05", *lying_pairs(local, attempt, "s05", ["s00", "s01"], drawn(3, 2)))
    attempt.add("s06", *lying_pairs(local, attempt, "s06", ["s02"], drawn(3, 2)))
    assert attempt.faulty.keys() == {"s02", "s05", "s06"}


# The list and its signatures


def test_a_list_is_closed_with_enough_sites_and_none_is_asked_before():
    local = run(SITES, least=3)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:4])}))
    with pytest.raises(QuorumError, match="at least 5 sites, but only 4"):
        attempt.close()
    add(attempt, masked(local, attempt, {SITES[4]: drawn(3, 4)}))
    attempt.close()
    assert attempt.in_sum == tuple(SITES[:5])
    assert attempt.silent == SITES[5:]
    assert attempt.agree_requests().keys() == set(SITES[:5])


def test_a_list_below_the_least_is_not_closed():
    local = run(SITES, least=6)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:5])}))
    with pytest.raises(QuorumError, match="secure.min-sites, secure.threshold: a sum needs at least 6 sites"):
        attempt.close()


def test_a_quorum_of_signatures_is_a_certificate_and_one_less_is_none(round_of_seven):
    local, attempt, vectors, _ = round_of_seven
    attempt.close()
    asked = attempt.agree_requests()
    for count, site in enumerate(SITES[:5], start=1):
        with pytest.raises(QuorumError, match=rf"secure\.threshold: 5 sites must sign .*only {count - 1} did"):
            attempt.open_requests()
        attempt.take_agreement(site, local.sites[site].agree(asked[site]))
    requests = attempt.open_requests()
    assert requests.keys() == set(SITES[:6])  # s05 has not signed; to open is to sign
    assert all(request.agreed.keys() == set(SITES[:5]) for request in requests.values())
    for site, request in requests.items():
        attempt.take_opening(site, local.sites[site].open(request))
    assert attempt.total().tolist() == sum_of(vectors)


def test_a_signature_of_another_list_plan_or_site_is_no_agreement(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attempt.close()
    answer = local.sites["s00"].agree(attempt.agree_requests()["s00"])
    for forged in (
        changed(answer, list="0" * 64),
        changed(answer, plan="0" * 64),
        changed(answer, signature="0" * 128),
        local.sites["s01"].agree(attempt.agree_requests()["s01"]),
    ):
        with pytest.raises(WireError, match="s00's signature of this list"):
            attempt.take_agreement("s00", forged)
    assert attempt.agreed == {}


def test_where_nobody_is_missing_no_list_is_signed():
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    vectors = {s: drawn(3, i) for i, s in enumerate(SITES)}
    add(attempt, masked(local, attempt, vectors))
    attempt.close()
    assert not attempt.needs_agreement
    assert all(request.agreed == {} for request in attempt.open_requests().values())
    attempt.in_sum = ()
    assert unmasked(local, attempt, deaf=SITES[:2]).tolist() == sum_of(vectors)


# Shares


def wrong_share(opened, how: str, sites=None):
    """The opening with other bytes in its shares of these sites."""
    sites = opened.own if sites is None else sites
    if how == "own":
        return changed(opened, own=opened.own | {site: os.urandom(16).hex() for site in sites})
    pairs = {s: dict.fromkeys(of, os.urandom(16).hex()) if s in sites else of for s, of in opened.pairs.items()}
    return changed(opened, pairs=pairs)


@pytest.mark.long
@pytest.mark.parametrize("how", ["own", "pairs"])
@pytest.mark.parametrize("liar", SITES[:6])
def test_one_holder_with_wrong_shares_is_left_out_and_the_sum_is_right(round_of_seven, liar, how):
    local, attempt, vectors, _ = round_of_seven
    wrong = opened_with(local, attempt, lambda holder, said: wrong_share(said, how) if holder == liar else said)
    assert list(wrong) == [liar]
    assert "other shares than s00, s01, s02, s03, s04, s05 made" in wrong[liar]
    assert attempt.faulty.keys() == {liar}  # six sites cannot all have made bad shares for it
    assert attempt.total().tolist() == sum_of(vectors)


def test_wrong_shares_are_waited_past_until_enough_are_right(round_of_seven):
    local, attempt, vectors, _ = round_of_seven
    closed(local, attempt)
    requests = attempt.open_requests()
    first = signed(wrong_share(local.sites["s00"].open(requests["s00"]), "own"), "s00", key_of(local, "s00"))
    with pytest.raises(WireError, match="returned other shares"):
        attempt.take_opening("s00", first)
    for i, holder in enumerate(SITES[1:6], 1):
        assert attempt.wanting == SITES[:6]
        attempt.take_opening(holder, local.sites[holder].open(requests[holder]))
        assert bool(attempt.wanting) == (i < 5)
    assert attempt.total().tolist() == sum_of(vectors)


def test_a_wrong_share_says_nothing_about_the_others_of_its_holder(round_of_seven):
    local, attempt, vectors, _ = round_of_seven
    wrong = opened_with(local, attempt, lambda holder, said: wrong_share(said, "own", [holder]))
    assert list(wrong) == SITES[:6]
    assert attempt.faulty == {}
    assert attempt.total().tolist() == sum_of(vectors)


@pytest.mark.parametrize(("complaining", "named"), [(2, set()), (3, {"s05"})])
def test_a_dealer_is_named_once_more_holders_complain_than_can_lie_or_be_silent(complaining, named):
    """m - q = 2 of seven, of which one may collude: among three that complain one is honest."""
    local = run(SITES, least=3)
    attempt = local.begin(0, 0, SITES)
    vectors = {s: drawn(9, i) for i, s in enumerate(SITES)}
    add(attempt, masked(local, attempt, vectors))

    def lies(holder, said):
        return _unread(said, "s05") if holder in SITES[:complaining] else said

    assert opened_with(local, attempt, lies) == {}
    if complaining < 3:
        assert attempt.total().tolist() == sum_of(vectors)
        assert attempt.faulty == {}
        return
    assert attempt.wanting == ["s05"]
    assert attempt.faulty.keys() == named
    with pytest.raises(QuorumError, match=r"secure\.threshold: 5 sites must open their shares of s05"):
        attempt.total()


def _unread(said, site):
    return changed(
        said, own=_without(said.own, site), pairs=_without(said.pairs, site), unread=sorted({*said.unread, site})
    )


@pytest.mark.parametrize("lie", ["wrong", "unread"])
def test_a_complaint_that_costs_the_sum_names_both(lie):
    """Of three sites, of which all must open their shares, one dealer and one holder cannot both be honest."""
    local = run(SITES[:3])
    attempt = local.begin(0, 0, SITES[:3])
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:3])}))

    def lies(holder, said):
        if holder != "s01":
            return said
        return wrong_share(said, "own", ["s02"]) if lie == "wrong" else _unread(said, "s02")

    opened_with(local, attempt, lies)
    assert attempt.wanting == ["s02"]
    assert attempt.faulty.keys() == {"s01", "s02"}


def test_a_silent_holder_names_nobody():
    local = run(SITES[:3])
    attempt = local.begin(0, 0, SITES[:3])
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:3])}))
    local.unmask(attempt, deaf=["s01"])
    assert attempt.wanting == SITES[:3]
    assert attempt.faulty == {}
    with pytest.raises(QuorumError, match="3 sites must open their shares of s00, s01, s02, but fewer did"):
        attempt.total()


def test_below_the_threshold_of_signatures_there_is_no_sum(round_of_seven):
    local, attempt, _, _ = round_of_seven
    with pytest.raises(QuorumError, match=r"secure\.threshold: 5 sites must sign"):
        unmasked(local, attempt, deaf=SITES[:2])


def dealt(local, attempt, site: str, secret: bytes, vector, garbage=False):
    """An upload of `site` whose shares, all with their digests, are of another secret; or nobody can decrypt them."""
    plan, private = attempt.plan, bytes.fromhex(local.sites[site].store.load().next.private)
    hidden, attached = masked(local, attempt, {site: vector})[site]
    holders, partners, rows, shares = plan.holders(site), plan.partners(site), {}, {}
    secrets = [secret, *(os.urandom(16) for _ in partners)]
    for holder, row in zip(holders, shamir.split_secrets(secrets, plan.threshold, len(holders)), strict=True):
        shared = crypto.exchange_keys(private, bytes.fromhex(plan.by_name[holder].key))
        key = os.urandom(32) if garbage else derivations.row_key(shared, plan.digest, site, holder)
        rows[holder] = derivations.encrypt_row(key, row, plan.digest, site, holder)
        shares[holder] = [
            derivations.share_digest(share, plan.digest, site, holder, other)
            for share, other in zip(row, ("", *partners), strict=True)
        ]
    return hidden, signed(changed(attached, rows=rows, shares=shares), site, key_of(local, site))


def test_a_site_that_shares_another_secret_than_it_masked_with_is_named_alone(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attempt.add("s06", *dealt(local, attempt, "s06", os.urandom(16), drawn(9, 6)))
    assert opened_with(local, attempt) == {}
    assert attempt.wanting == []
    assert attempt.faulty == {"s06": "its shares do not reconstruct its secret"}
    with pytest.raises(QuorumError, match="shares of s06's secret reconstruct a different"):
        attempt.total()


def test_a_site_whose_rows_nobody_can_decrypt_is_named_alone_and_the_others_shares_are_opened(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attempt.add("s06", *dealt(local, attempt, "s06", os.urandom(16), drawn(9, 6), garbage=True))
    opened_with(local, attempt)
    assert attempt.wanting == ["s06"]
    assert attempt.faulty == {"s06": "its shares could not be used by many holders"}
    with pytest.raises(QuorumError, match="open their shares of s06, but fewer did"):
        attempt.total()


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        (lambda said: changed(said, own=said.own | {"s06": "00" * 16}), "for each requested site"),
        (lambda said: changed(said, own=_without(said.own, "s00")), "for each requested site"),
        (lambda said: changed(said, unread=["s00"]), "for each requested site"),
        (lambda said: changed(said, unread=["s06"]), "for each requested site"),
        (lambda said: changed(said, pairs={}), "unresponsive partners"),
        (
            lambda said: changed(said, pairs=said.pairs | {"s00": {"s06": "00" * 16, "s01": "00" * 16}}),
            "unresponsive partners",
        ),
        (lambda said: changed(said, pairs=said.pairs | {"s00": {"s01": "00" * 16}}), "unresponsive partners"),
        (lambda said: changed(said, list="0" * 64), "are for a different list"),
        (lambda said: changed(said, plan="0" * 64), "are for a different list"),
    ],
)
def test_an_opening_of_other_shares_than_asked_for_is_refused_whole(round_of_seven, lie, match):
    local, attempt, _, _ = round_of_seven
    closed(local, attempt)
    answer = local.sites["s02"].open(attempt.open_requests()["s02"])
    with pytest.raises(WireError, match=match):
        attempt.take_opening("s02", signed(lie(answer), "s02", key_of(local, "s02")))
    assert attempt.faulty == {}
    attempt.take_opening("s02", answer)


def test_an_opening_that_its_holder_did_not_sign_is_refused(round_of_seven):
    local, attempt, _, _ = round_of_seven
    closed(local, attempt)
    answer = local.sites["s02"].open(attempt.open_requests()["s02"])
    for forged in (wrong_share(answer, "own"), signed(answer, "s02", stranger())):
        with pytest.raises(
            WireError, match="the shares of s02 are for a different list, or their signature is invalid"
        ):
            attempt.take_opening("s02", forged)
    with pytest.raises(WireError, match="the shares of s03 are for a different list, or their signature is invalid"):
        attempt.take_opening("s03", answer)


# Prekeys, and the numbers of attempts


def test_a_prekey_must_be_of_its_site_signed_and_its_own():
    local = run(SITES)
    coordinator = local.coordinator
    answers = {name: site.ready(coordinator.request()) for name, site in local.sites.items()}
    coordinator.admit("s00", answers["s00"])
    mine, key, other = answers["s01"].prekey, key_of(local, "s01"), stranger()
    for prekey in (
        answers["s02"].prekey,  # another site's
        changed(mine, key=answers["s02"].prekey.key),  # not what was signed
        changed(mine, number=7),
        signed_prekey(mine, key, "another"),  # of another run
        signed_prekey(changed(mine, key=answers["s00"].prekey.key), key),  # signed, but s00's
        *(signed_prekey(changed(mine, key=point.hex()), key) for point in LOW_ORDER),
        signed_prekey(changed(mine, signing_key=crypto.verifying_key(other).hex()), other),  # not in the registry
    ):
        with pytest.raises(WireError):
            coordinator.admit("s01", changed(answers["s01"], prekey=prekey.model_dump()))
    coordinator.admit("s01", answers["s01"])
    coordinator.admit("s00", answers["s00"])  # as after a restart of the server


def test_a_prekey_is_its_first_owner_s_for_the_rest_of_the_run():
    """A plan shows prekeys to all sites: one that copies another's does not keep it out, even once it was used up."""
    local = run(SITES)
    coordinator = local.coordinator
    plan = local.begin(0, 0, SITES).plan  # s01 masks nothing, so its prekey stays as it was
    assert coordinator.ready == {}
    copied = signed_prekey(changed(plan.by_name["s02"], key=plan.by_name["s01"].key), key_of(local, "s02"))
    with pytest.raises(WireError, match="s02 sent the prekey of s01 as its own"):
        coordinator.admit("s02", KeysResponse(prekey=copied, after=None, signed=None))
    coordinator.admit("s01", local.sites["s01"].ready(coordinator.request()))
    top_bit = bytes.fromhex(copied.key)[:31] + bytes([bytes.fromhex(copied.key)[31] | 0x80])
    disguised = signed_prekey(changed(copied, key=top_bit.hex()), key_of(local, "s02"))
    with pytest.raises(WireError, match="this is not a prekey of s02, signed with its registered key"):
        coordinator.admit("s02", KeysResponse(prekey=disguised, after=None, signed=None))


def test_known_sites_are_restored_with_their_last_keys_and_expulsions():
    """The owners of used prekeys are dropped: there is one entry a site, however long the run is."""
    local = run(SITES)
    before = local.coordinator
    attempt = local.begin(0, 0, SITES)
    uploads = masked(local, attempt, {site: drawn(3, i) for i, site in enumerate(SITES)})
    for site, (_, attached) in uploads.items():
        before.keep(site, attempt.plan, attached.next)
    before.expel("s06", "it lies")
    known_sites = before.known_sites()
    assert known_sites["prekeys"] == {site: attached.next.key for site, (_, attached) in uploads.items()}
    after = SecAggCoordinator(RUN, SecAggConfig(), "0" * 64)
    after.restore_sites(**known_sites)
    assert after.known_sites() == known_sites
    assert after.expelled == before.expelled
    next_key = uploads["s01"][1].next.key
    copied = signed_prekey(changed(attempt.plan.by_name["s02"], key=next_key), key_of(local, "s02"))
    with pytest.raises(WireError, match="s02 sent the prekey of s01 as its own"):
        after.admit("s02", KeysResponse(prekey=copied, after=None, signed=None))
    fresh = {"key": crypto.public_key_of(stranger()).hex(), "signing_key": attempt.plan.by_name["s01"].signing_key}
    twice = signed_prekey(changed(copied, **fresh), key_of(local, "s01"))
    with pytest.raises(WireError, match="s02 sent the signing key of s01 as its own"):
        after.admit("s02", KeysResponse(prekey=twice, after=None, signed=None))


def test_without_a_registry_no_signing_key_stands_under_two_names():
    local = run(SITES[:2])
    coordinator = SecAggCoordinator(RUN, SecAggConfig(), "0" * 64)
    answers = {name: site.ready(coordinator.request()) for name, site in local.sites.items()}
    coordinator.admit("s00", answers["s00"])
    twice = changed(answers["s01"].prekey, signing_key=answers["s00"].prekey.signing_key)
    with pytest.raises(WireError, match="sent the signing key of s00 as its own"):
        coordinator.admit(
            "s01", changed(answers["s01"], prekey=signed_prekey(twice, key_of(local, "s00")).model_dump())
        )


def test_a_plan_uses_up_the_prekeys_of_its_cohort_and_the_upload_brings_the_next():
    local = run(SITES)
    attempt = local.begin(0, 0, SITES[:6])
    coordinator = local.coordinator
    assert coordinator.ready == {}
    uploads = masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:6])})
    add(attempt, uploads)
    for site, attached in attempt.uploads.items():
        coordinator.keep(site, attempt.plan, attached.next)
    second = local.begin(0, coordinator.next_attempt(0, SITES[:6]), SITES[:6])
    assert second.plan.attempt == 1
    assert {member.number for member in second.plan.members} == {1}
    add(second, masked(local, second, {s: drawn(3, i) for i, s in enumerate(SITES[:6])}))
    assert unmasked(local, second).tolist() == sum_of({s: drawn(3, i) for i, s in enumerate(SITES[:6])})


def known(local, **answers) -> SecAggCoordinator:
    """A coordinator after a restart, to which sites say what they masked and signed last."""
    coordinator = SecAggCoordinator(RUN, local.settings, local.coordinator.config, local.coordinator.roster)
    for site, update in answers.items():
        coordinator.admit(site, changed(local.sites[site].ready(coordinator.request()), **update))
    return coordinator


def test_an_attempt_has_a_number_above_those_that_server_and_cohort_remember():
    local = run(SITES)
    coordinator = known(local, s00={}, s01={"after": [3, 4]}, s02={"after": [2, 9]}, s03={"after": [3, 7]})
    assert coordinator.next_attempt(3, ["s00", "s02"]) == 0
    assert coordinator.next_attempt(3, ["s00", "s01"]) == 5
    assert coordinator.next_attempt(3, ["s00", "s01", "s03"]) == 8
    local.coordinator = coordinator
    local.begin(3, 8, SITES)
    assert coordinator.next_attempt(3, []) == 9
    assert coordinator.next_attempt(4, []) == 0


def test_sites_that_would_refuse_a_round_for_ever_are_left_out_of_it():
    local = run(SITES)
    coordinator = known(
        local, s00={"signed": 3}, s01={"signed": 2, "after": [3, 0]}, s02={"after": [4, 0]}, s03={"after": [3, 999]},
        s04={"after": [3, 1000]}, s05={},
    )  # fmt: skip
    assert coordinator.refusals(3).keys() == {"s00", "s02", "s04"}
    assert "agreed to a sum of round 4" in coordinator.refusals(3)["s00"]
    assert "masked an upload for round 5" in coordinator.refusals(3)["s02"]
    assert "1000 attempts" in coordinator.refusals(3)["s04"]
    assert coordinator.refusals(4) == {}
    assert coordinator.refusals(2).keys() == {"s00", "s01", "s02", "s03", "s04"}


def test_a_late_attempt_of_this_run_is_no_site_s_fault():
    """One site names attempt 999, the next one is 1000, and the sites that masked in it are asked again."""
    local = run(SITES)
    local.coordinator = coordinator = known(local, s00={"after": [3, 999]})
    local.begin(3, coordinator.next_attempt(3, ["s00"]), SITES)
    coordinator.admit("s01", changed(local.sites["s01"].ready(coordinator.request()), after=[3, 1000]))
    coordinator.admit("s02", changed(local.sites["s02"].ready(coordinator.request()), after=[3, 1001]))
    assert coordinator.refusals(3).keys() == {"s02"}


def test_a_site_that_is_expelled_is_forgotten_and_the_reason_is_known():
    local = run(SITES)
    local.begin(0, 0, SITES[:6])
    coordinator = local.coordinator
    coordinator.admit("s06", local.sites["s06"].ready(coordinator.request()))
    coordinator.expel("s06", "its shares do not reconstruct its secret")
    assert "s06" not in coordinator.ready
    assert coordinator.expelled == {
        "s06": "secure: its shares do not reconstruct its secret, so the run continues without it"
    }


@pytest.mark.parametrize(
    ("count", "settings", "match"),
    [
        (3, {"least": 5}, r"min-sites, secure\.threshold: expected at least 5 sites with keys, found 3"),
        (3, {"threshold": 4}, r"expected at least 4 sites with keys, found 3"),
        (8, {"threshold": 4}, r"secure\.threshold: expected more than 4 of 8 sites, found 4"),
        (9, {"threshold": 5}, r"secure\.threshold: expected more than 5 of 9 sites, found 5"),
        (2, {}, r"at least 2 sites more than the 1 that may collude \(secure\.max-colluders\), but may have only 2"),
        (5, {"colluding": 4}, r"at least 2 sites more than the 4 that may collude"),
    ],
)
def test_a_cohort_whose_plan_every_site_would_refuse_is_not_asked(count, settings, match):
    with pytest.raises(QuorumError, match=match):
        run(names(count), **settings).begin(0, 0, names(count))


@pytest.mark.parametrize(("count", "colluding", "quorum"), [(3, 1, 3), (4, 1, 3), (5, 1, 4), (10, 1, 7), (10, 6, 9)])
def test_the_quorum_is_more_than_two_thirds_and_raised_until_two_lists_cannot_be_signed(count, colluding, quorum):
    assert SecAggConfig(colluding=colluding).quorum(count) == quorum
    assert 2 * quorum > count + colluding
    assert SecAggConfig(colluding=colluding, threshold=2).quorum(count) == 2  # as it is set; then the plan is refused


def test_a_site_that_lost_its_keys_is_asked_again_and_takes_part():
    local = run(SITES)
    first = local.begin(0, 0, SITES).plan
    local.coordinator.forget("s03")
    local.sites["s03"].store._kept = None
    attempt = local.begin(0, 1, SITES)
    assert attempt.plan.by_name["s03"].key != first.by_name["s03"].key
    vectors = {s: drawn(4, i) for i, s in enumerate(SITES)}
    add(attempt, masked(local, attempt, vectors))
    assert unmasked(local, attempt).tolist() == sum_of(vectors)
