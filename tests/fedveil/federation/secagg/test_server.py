"""The server's half: what it takes of sites that lie, and what it makes of shares that do not fit."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg import crypto, shamir
from fedveil.federation.secagg.membership import EncryptedShares
from fedveil.federation.secagg.pairwise_keys import mask_purpose
from tests.fedveil.federation.secagg.sites import (
    add,
    changed,
    drawn,
    masked,
    names,
    run,
    signed,
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


def answered(local, attempt, lies=lambda holder, opened: opened) -> dict[str, str]:
    """Asks all holders; `lies` says what one sends in place of its answer. Returns what is said of wrong ones."""
    wrong = {}
    for holder, asked in attempt.questions().items():
        try:
            attempt.answer(holder, lies(holder, local.sites[holder].unmask(asked)))
        except WireError as error:
            wrong[holder] = str(error)
    return wrong


@pytest.fixture
def round_of_seven():
    """All seven have masked; the first six upload. t = 5."""
    local = run(SITES, least=3)
    attempt = local.begin(0, 0, SITES)
    vectors = {s: drawn(9, i) for i, s in enumerate(SITES[:6])}
    uploads = masked(local, attempt, vectors)
    add(attempt, uploads)
    return local, attempt, vectors, uploads


@pytest.mark.long
@pytest.mark.parametrize("how", ["heard", "silent"])
@pytest.mark.parametrize("liar", SITES)
def test_one_holder_with_wrong_shares_is_left_out_and_the_sum_is_right(round_of_seven, liar, how):
    local, attempt, vectors, _ = round_of_seven

    def lies(holder, opened):
        wrong = {site: os.urandom(16).hex() for site in getattr(opened, how)}
        return changed(opened, **{how: wrong}) if holder == liar else opened

    wrong = answered(local, attempt, lies)
    assert list(wrong) == [liar]
    assert f"its shares of {'s00, s01' if how == 'heard' else 's06'}" in wrong[liar]
    assert attempt.faulty == []
    assert attempt.total().tolist() == sum_of(vectors)


@pytest.mark.parametrize("how", ["heard", "silent"])
def test_as_many_wrong_holders_as_may_be_silent_cost_nothing_and_are_waited_past(round_of_seven, how):
    """They answer first: until t others have answered, there is no sum to be opened."""
    local, attempt, vectors, _ = round_of_seven
    questions = attempt.questions()
    for holder in SITES[:2]:
        opened = local.sites[holder].unmask(questions[holder])
        wrong = {site: os.urandom(16).hex() for site in getattr(opened, how)}
        with pytest.raises(WireError, match="as those sites made them"):
            attempt.answer(holder, changed(opened, **{how: wrong}))
    for i, holder in enumerate(SITES[2:], 1):
        assert attempt.wanting
        attempt.answer(holder, local.sites[holder].unmask(questions[holder]))
        assert bool(attempt.wanting) == (i < 5)
    assert attempt.faulty == []
    assert attempt.total().tolist() == sum_of(vectors)


@pytest.mark.parametrize("lie", ["wrong", "none"])
def test_one_site_alone_gets_no_other_left_out(lie):
    """Of three sites, of which all must open their shares, one ends the attempt; the others are not blamed for it."""
    local = run(SITES[:3])
    attempt = local.begin(0, 0, SITES[:3])
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:3])}))

    def lies(holder, opened):
        heard = dict.fromkeys(opened.heard, "00" * 16) if lie == "wrong" else {}
        return changed(opened, heard=heard) if holder == "s01" else opened

    answered(local, attempt, lies)
    assert attempt.wanting == SITES[:3]
    assert attempt.faulty == []


@pytest.mark.parametrize("least", [6, 7])
@pytest.mark.parametrize("liars,blamed", [(4, []), (5, ["s06"])])
def test_sites_that_work_with_the_server_get_no_honest_one_left_out(least, liars, blamed):
    """t = 5: by the claim four may. The repetition without the seventh would give its upload by subtraction."""
    local = run(SITES, least=least)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES)}))

    def lies(holder, opened):
        left = {site: share for site, share in opened.heard.items() if site != "s06"}
        return changed(opened, heard=left) if holder in SITES[:liars] else opened

    answered(local, attempt, lies)
    assert "s06" in attempt.wanting
    assert attempt.faulty == blamed


def test_a_wrong_share_says_nothing_about_the_others_of_its_holder(round_of_seven):
    local, attempt, vectors, _ = round_of_seven

    def lies(holder, opened):
        """Each holder lies about another site, two about none."""
        return changed(opened, heard=opened.heard | {holder: "00" * 16}) if holder in opened.heard else opened

    wrong = answered(local, attempt, lies)
    assert list(wrong) == SITES[:6]
    assert attempt.total().tolist() == sum_of(vectors)


def test_shares_that_no_five_holders_open_throw_the_attempt_away(round_of_seven):
    local, attempt, _, _ = round_of_seven

    def lies(holder, opened):
        return changed(opened, heard=opened.heard | {"s03": os.urandom(16).hex()}) if holder < "s04" else opened

    answered(local, attempt, lies)
    assert attempt.faulty == ["s03"]
    with pytest.raises(QuorumError, match="s03"):
        attempt.total()


def test_a_site_that_shares_another_secret_than_it_masked_with_is_named(round_of_seven):
    local, attempt, _vectors, _ = round_of_seven
    liar = local.sites["s06"]
    seed = liar.store.load().run_key
    attached = liar.mask(attempt.plan, drawn(9, 6))
    closed, digests = {}, {}
    for holder, share in zip(SITES, shamir.split_secret(os.urandom(16), 5, 7), strict=True):
        purpose = mask_purpose(attempt.plan, "s06", holder)
        public = bytes.fromhex(attempt.membership.by_name[holder].run_key)
        closed[holder] = crypto.encrypt_share(
            crypto.agree_secret(bytes.fromhex(seed), public, purpose), share, purpose
        ).hex()
        digests[holder] = crypto.share_digest(share, purpose)
    shares = EncryptedShares(closed=closed, digests=digests)
    attempt.add("s06", drawn(9, 7), changed(attached, shares=shares.model_dump()))
    assert answered(local, attempt) == {}
    assert attempt.faulty == ["s06"]
    with pytest.raises(QuorumError, match="s06"):
        attempt.total()


def test_a_site_whose_shares_nobody_can_open_is_named_and_the_others_shares_are_opened(round_of_seven):
    local, attempt, _, _ = round_of_seven
    attached = local.sites["s06"].mask(attempt.plan, drawn(9, 6))
    garbage = {holder: os.urandom(44).hex() for holder in SITES}
    attempt.add("s06", drawn(9, 7), changed(attached, shares=attached.shares.model_dump() | {"closed": garbage}))
    answered(local, attempt)
    assert attempt.wanting == attempt.faulty == ["s06"]
    with pytest.raises(QuorumError, match="open their shares of s06, found fewer"):
        attempt.total()


@pytest.mark.parametrize(
    "lie",
    [
        lambda opened: changed(opened, silent=opened.silent | {"s00": "00" * 16}),
        lambda opened: changed(opened, heard=opened.heard | opened.silent, silent={}),
    ],
)
def test_shares_that_were_not_asked_for_are_refused(round_of_seven, lie):
    local, attempt, _, _ = round_of_seven
    asked = attempt.questions()["s02"]
    with pytest.raises(WireError, match="expected the requested shares"):
        attempt.answer("s02", lie(local.sites["s02"].unmask(asked)))


def test_an_upload_is_taken_once_in_time_and_of_the_cohort(round_of_seven):
    local, attempt, vectors, uploads = round_of_seven
    with pytest.raises(WireError, match="one upload per site"):
        attempt.add("s00", *uploads["s00"])
    with pytest.raises(WireError, match="one upload per site"):
        attempt.add("s99", *uploads["s00"])
    late = masked(local, attempt, {"s06": drawn(9, 6)})
    asked = attempt.questions()
    with pytest.raises(WireError, match="before the sum is closed"):
        add(attempt, late)
    for holder in SITES[:6]:  # s06 itself says that it has masked, and opens nothing
        attempt.answer(holder, local.sites[holder].unmask(asked[holder]))
    assert attempt.total().tolist() == sum_of(vectors)


@pytest.mark.parametrize("holders", [SITES[:6], SITES[1:], [*SITES, "s99"], []])
def test_an_upload_without_a_share_for_each_holder_is_refused(round_of_seven, holders):
    local, attempt, _, _ = round_of_seven
    (hidden, attached) = masked(local, attempt, {"s06": drawn(9, 6)})["s06"]
    closed, digests = dict.fromkeys(holders, "00" * 44), dict.fromkeys(holders, "00" * 16)
    for shares in ({"closed": closed}, {"digests": digests}, {"closed": closed, "digests": digests}):
        with pytest.raises(WireError, match="each of its holders"):
            attempt.add("s06", hidden, changed(attached, shares=attached.shares.model_dump() | shares))


def test_below_the_least_nobody_is_asked_and_nothing_is_opened():
    local = run(SITES, least=4)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:3])}))
    with pytest.raises(QuorumError, match=r"min-sites: expected a sum of at least 4 sites, found 3"):
        attempt.questions()
    with pytest.raises(QuorumError):
        attempt.total()


def test_with_more_silent_sites_than_holders_may_be_nobody_is_asked():
    """Each holder would refuse it: t = 5 of seven, so at most two may be missing."""
    local = run(SITES, least=3)
    attempt = local.begin(0, 0, SITES)
    add(attempt, masked(local, attempt, {s: drawn(3, i) for i, s in enumerate(SITES[:4])}))
    with pytest.raises(QuorumError, match="at most 2 silent sites of 7, found 3: no holder opens"):
        attempt.questions()
    add(attempt, masked(local, attempt, {SITES[4]: drawn(3, 4)}))
    assert attempt.questions().keys() == set(SITES)


def test_below_the_threshold_there_is_no_sum(round_of_seven):
    local, attempt, _, _ = round_of_seven
    with pytest.raises(QuorumError, match="secure.threshold: expected 5 holders"):
        unmasked(local, attempt, deaf=SITES[:3])


def test_a_run_key_must_be_of_its_site_signed_and_its_own():
    local = run(SITES)
    coordinator = local.coordinator
    hellos = {name: site.hello(coordinator.hello()) for name, site in local.sites.items()}
    coordinator.admit("s00", hellos["s00"])
    other = changed(hellos["s01"], run_key=hellos["s00"].run_key)
    key = local.sites["s01"].signing_key
    low = [changed(hellos["s01"], run_key=point.hex()) for point in LOW_ORDER]
    foreign = stranger()
    for member in (
        hellos["s02"],  # another site's
        changed(hellos["s01"], run_key=hellos["s02"].run_key),  # not what was signed
        signed(other, key, other.text(coordinator.run)),  # signed, but s00's
        *(signed(member, key, member.text(coordinator.run)) for member in low),
        signed(  # by a key that the registry does not have
            changed(hellos["s01"], signing_key=crypto.verifying_key(foreign).hex()),
            foreign,
            hellos["s01"].text(coordinator.run),
        ),
    ):
        with pytest.raises(WireError):
            coordinator.admit("s01", member)
    coordinator.admit("s01", hellos["s01"])
    coordinator.admit("s00", hellos["s00"])  # as after a restart of the site


def test_a_prekey_must_be_of_its_site_for_the_membership_with_a_share_for_each_holder():
    local = run(SITES)
    local.begin(0, 0, SITES)
    coordinator = local.coordinator
    setup = coordinator.settle_on(SITES)
    bundles = {name: site.join(setup) for name, site in local.sites.items()}
    mine, key, text = bundles["s00"], local.sites["s00"].signing_key, setup.membership.digest
    low = changed(mine.prekey, key="00" * 32)
    fewer = changed(mine.shares, closed=dict(list(mine.shares.closed.items())[1:]))
    short = changed(mine.prekey, shares=fewer.digest)
    for bundle in (
        bundles["s01"],
        changed(mine, prekey=changed(mine.prekey, number=7).model_dump()),
        changed(mine, prekey=signed(mine.prekey, stranger(), mine.prekey.text(text)).model_dump()),
        changed(mine, prekey=signed(mine.prekey, key, mine.prekey.text("0" * 64)).model_dump()),
        changed(mine, prekey=signed(low, key, low.text(text)).model_dump()),
        changed(mine, shares=bundles["s01"].shares.model_dump()),
        changed(mine, shares=fewer.model_dump(), prekey=signed(short, key, short.text(text)).model_dump()),
    ):
        with pytest.raises(WireError):
            coordinator.keep("s00", bundle)
    coordinator.keep("s00", mine)


def test_a_site_that_is_expelled_is_in_no_membership_that_follows():
    local = run(SITES)
    local.begin(0, 0, SITES)
    coordinator = local.coordinator
    coordinator.expel("s02")
    setup = coordinator.settle_on(SITES)
    assert "s02" not in setup.membership.by_name
    assert coordinator.bundles == {}  # of the membership with it
    assert "without it" in coordinator.expelled["s02"]


def test_too_few_sites_for_the_sum_or_for_the_threshold():
    with pytest.raises(QuorumError, match=r"min-sites: expected at least 5 sites with keys, found 3"):
        run(names(3), least=5).begin(0, 0, names(3))
    with pytest.raises(QuorumError, match=r"threshold: expected at least 4 holders of a secret, found 3"):
        run(names(3), threshold=4).begin(0, 0, names(3))


def test_a_site_that_lost_its_keys_begins_a_new_membership_and_the_others_go_on():
    local = run(SITES)
    first = local.begin(0, 0, SITES).membership
    again = local.begin(0, 1, SITES)  # every prekey is spent with an attempt; all are asked for new ones
    assert again.membership == first
    local.coordinator.forget("s03")
    local.sites["s03"].store._kept = None
    attempt = local.begin(1, 0, SITES)
    assert attempt.membership != first
    vectors = {s: drawn(4, i) for i, s in enumerate(SITES)}
    add(attempt, masked(local, attempt, vectors))
    assert unmasked(local, attempt).tolist() == sum_of(vectors)
