"""A server that lies before anything is masked: the plans that a site does not mask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.messages import KeysRequest
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import (
    RUN,
    changed,
    drawn,
    names,
    run,
    signed_prekey,
    stranger,
    with_members,
)  # fmt: skip

SITES = names(5)
POINTS = [  # of low order, by their u: 0, 1, p - 1, p, p + 1, and one of order 8
    0,
    1,
    2**255 - 20,
    2**255 - 19,
    2**255 - 18,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
]


def low_order(u: int) -> str:
    return u.to_bytes(32, "little").hex()


class Lied:
    """Five sites, and what an honest server would send them: the parts of a lie. q = 4."""

    def __init__(self, demands: SiteRequirements = SiteRequirements(), **settings) -> None:
        self.local = run(SITES, demands, **settings)
        self.site = self.local.sites["s00"]
        self.plan = self.local.begin(3, 0, SITES).plan
        self.terms = self.local.terms(self.plan)

    def key(self, name: str) -> bytes:
        return self.local.sites[name].signing_key

    def refused(self, match: str, kind=PolicyError, plan=None, terms=None, site=None) -> None:
        """The site begins no client round, masks nothing, and keeps its state."""
        site = site or self.site
        before, vector = site.store.load(), drawn(4, 1)
        for ask in (site.begin, lambda plan, terms: site.mask(plan, terms, vector)):
            with pytest.raises(kind, match=match):
                ask(plan or self.plan, terms or self.terms)
        assert site.store.load() == before
        assert vector.tolist() == drawn(4, 1).tolist()


@pytest.fixture
def lied() -> Lied:
    return Lied()


def test_another_run(lied):
    with pytest.raises(PolicyError, match="run"):
        lied.site.ready(KeysRequest(run="another"))
    lied.refused("run", WireError, changed(lied.plan, run="another"))
    other = replace(lied.terms, run="another")
    lied.refused("prekey", WireError, changed(lied.plan, run="another"), other)


def test_keys_are_made_once_and_never_without_being_asked(lied):
    asked = KeysRequest(run=RUN)
    assert lied.site.ready(asked) == lied.site.ready(asked)
    assert lied.site.ready(asked).prekey.number == 0
    new = SecAggSite(RUN, "s00", lied.key("s00"), MemorySecAggStore())
    lied.refused("latest unused prekey; request a new prekey", site=new)
    assert new.store.load() is None


def test_a_prekey_of_its_own_that_is_not_its_newest(lied):
    """The server shows it one of before it lost its keys, or of before it masked."""
    new = SecAggSite(RUN, "s00", lied.key("s00"), MemorySecAggStore())
    prekey = new.ready(KeysRequest(run=RUN)).prekey
    assert prekey.number == 0
    lied.refused("latest unused prekey", plan=with_members(lied.plan, s00=prekey))
    lied.refused("latest unused prekey", site=new)
    attached = lied.site.mask(lied.plan, lied.terms, drawn(4, 0))
    later, terms = changed(lied.plan, attempt=1), replace(lied.terms, attempt=1)
    lied.refused("latest unused prekey", plan=later, terms=terms)
    lied.site.begin(with_members(later, s00=attached.next), terms)


def test_a_plan_without_the_site_or_with_another_signing_key_of_its(lied):
    lied.refused(
        "its cohort does not contain this site",
        WireError,
        changed(with_members(lied.plan, s00=None), quorum=3, threshold=3),
    )
    foreign = stranger()
    prekey = changed(lied.plan.by_name["s00"], signing_key=crypto.verifying_key(foreign).hex())
    swapped = with_members(lied.plan, s00=signed_prekey(prekey, foreign))
    lied.refused("a different signing key for s00", plan=swapped)
    without = changed(swapped, roster="")
    lied.refused("signing-key: the plan lists", plan=without, terms=replace(lied.terms, roster=""))


def test_a_roster_in_which_the_site_has_another_key(lied):
    keys = SigningKeyRoster.from_bytes(lied.terms.roster.encode()).signing_keys
    foreign = stranger()
    public = crypto.verifying_key(foreign).hex()
    prekey = signed_prekey(changed(lied.plan.by_name["s00"], signing_key=public), foreign)
    roster = SigningKeyRoster(signing_keys=keys | {"s00": public})
    plan = changed(with_members(lied.plan, s00=prekey), roster=roster_digest(roster.signing_keys))
    lied.refused("signing-key: the plan lists", plan=plan, terms=replace(lied.terms, roster=roster.to_bytes().decode()))


@pytest.mark.parametrize("u", POINTS)
def test_points_of_low_order(lied, u):
    prekey = changed(lied.plan.by_name["s03"], key=low_order(u))
    lied.refused(
        "prekey of s03 is invalid, or not signed",
        WireError,
        with_members(lied.plan, s03=signed_prekey(prekey, lied.key("s03"))),
    )


def test_a_prekey_that_its_owner_did_not_sign(lied):
    prekey = lied.plan.by_name["s03"]
    for forged in (
        changed(prekey, key=crypto.public_key_of(stranger()).hex()),
        changed(prekey, number=9),
        signed_prekey(prekey, stranger()),
        signed_prekey(prekey, lied.key("s04")),
        signed_prekey(prekey, lied.key("s03"), "another"),
    ):
        lied.refused("prekey of s03 is invalid, or not signed", WireError, with_members(lied.plan, s03=forged))


def test_one_prekey_or_signing_key_under_two_names(lied):
    """Two names of one site would be two honest sites for the count."""
    plan, terms = changed(lied.plan, roster=""), replace(lied.terms, roster="")
    key = lied.plan.by_name["s04"].key
    twice = signed_prekey(changed(plan.by_name["s03"], key=key), lied.key("s03"))
    lied.refused("under two names", WireError, with_members(plan, s03=twice), terms)
    public = plan.by_name["s04"].signing_key
    twice = signed_prekey(changed(plan.by_name["s03"], signing_key=public), lied.key("s04"))
    lied.refused("under two names", WireError, with_members(plan, s03=twice), terms)


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_a_quorum_with_which_two_lists_can_be_signed(quorum):
    """2 q > 5 + 1; a run config that asks for less is refused too."""
    lied = Lied()
    plan = changed(lied.plan, quorum=quorum, threshold=quorum)
    lied.refused("quorum: expected 4", WireError, plan)
    lied.refused(r"secure\.threshold: 2 q: expected at least 7", plan=plan, terms=replace(lied.terms, threshold=quorum))


def test_a_threshold_below_the_policys():
    lied = Lied(SiteRequirements(min_threshold=5))
    lied.refused("min-threshold: quorum: expected at least 5 with 5 sites", plan=lied.plan)


def test_a_roster_that_is_not_theirs_or_a_member_that_is_not_on_it(lied):
    roster = lied.local.coordinator.roster
    site = replace(lied.site, demands=SiteRequirements(roster=roster_digest(roster)))
    site.begin(lied.plan, lied.terms)
    foreign = stranger()
    public = crypto.verifying_key(foreign).hex()
    for other in (roster | {"s03": public}, dict(list(roster.items())[:4])):
        text = SigningKeyRoster(signing_keys=other).to_bytes().decode()
        terms = replace(lied.terms, roster=text)
        lied.refused(
            "fedveil members roster", plan=changed(lied.plan, roster=roster_digest(other)), terms=terms, site=site
        )
        lied.refused("the digest that the plan names", WireError, terms=terms, site=site)
    lied.refused(
        "fedveil members roster", plan=changed(lied.plan, roster=""), terms=replace(lied.terms, roster=""), site=site
    )
    swapped = with_members(lied.plan, s03=signed_prekey(changed(lied.plan.by_name["s03"], signing_key=public), foreign))
    lied.refused("a different signing key for s03", plan=swapped, site=site)
    lied.site.begin(changed(swapped, roster=""), replace(lied.terms, roster=""))  # without a roster it cannot know


def test_the_roster_digest_tells_every_name_and_key():
    one = roster_digest({"a": "0" * 64, "b": "1" * 64})
    assert one == roster_digest({"b": "1" * 64, "a": "0" * 64})
    assert (
        len({one, roster_digest({"a": "1" * 64, "b": "0" * 64}), roster_digest({"a": "0" * 64}), roster_digest({})})
        == 4
    )


@pytest.mark.parametrize(("cohort", "match"), [(5, "sites of the cohort: expected at least 6"), (4, "")])
def test_a_cohort_below_the_sites_own(cohort, match):
    lied = Lied(SiteRequirements(min_cohort=cohort + 1 if match else cohort))
    if match:
        lied.refused(match)
    else:
        lied.site.begin(lied.plan, lied.terms)


def test_a_sum_below_the_sites_own():
    """A quorum of 4 of 5 makes sums of 4."""
    lied = Lied(SiteRequirements(min_cohort=5))
    lied.refused("sites in a sum: expected at least 5 .* found 4")
    all_of_them = Lied(SiteRequirements(min_cohort=5), least=5)
    all_of_them.site.begin(all_of_them.plan, all_of_them.terms)


def test_one_site_alone_is_no_sum_whatever_the_policy_says():
    lied = Lied(SiteRequirements(min_cohort=0))
    alone = changed(
        with_members(lied.plan, s01=None, s02=None, s03=None, s04=None), least=1, quorum=1, threshold=1, colluding=0
    )
    lied.refused(
        "honest sites in a sum: expected at least 2", plan=alone, terms=replace(lied.terms, least=1, colluding=0)
    )


@pytest.mark.parametrize(
    "update",
    [
        {"attempt": 1}, {"round": 7}, {"bits": 64}, {"most_weight": 2}, {"bound": 1.0}, {"noise": "sum"}, {"least": 3},
        {"colluding": 2}, {"quorum": 5}, {"config": "0" * 64}, {"broadcast": "0" * 64},
    ],
)  # fmt: skip
def test_numbers_other_than_those_of_the_instruction_and_the_run_config(lied, update):
    lied.refused(next(iter(update)), WireError, changed(lied.plan, **update))


def test_another_bundle_than_the_site_runs(lied):
    terms = replace(lied.terms, app="ab" * 32)
    lied.refused("app", WireError, terms=terms)
    lied.refused("app", WireError, changed(lied.plan, app="cd" * 32), terms)
    lied.site.begin(changed(lied.plan, app="ab" * 32), terms)
    lied.site.begin(changed(lied.plan, app="cd" * 32), lied.terms)  # a site without a guard does not look


def test_nothing_is_masked_for_a_plan_twice(lied):
    lied.site.mask(lied.plan, lied.terms, drawn(4, 0))
    lied.refused("latest unused prekey")


@pytest.mark.parametrize(("round_", "attempt"), [(3, 0), (2, 0), (2, 9)])
def test_nothing_is_masked_for_an_earlier_attempt_or_the_same(lied, round_, attempt):
    attached = lied.site.mask(lied.plan, lied.terms, drawn(4, 0))
    plan = with_members(changed(lied.plan, round=round_, attempt=attempt), s00=attached.next)
    lied.refused(
        "this site masked an update for attempt", plan=plan, terms=replace(lied.terms, round=round_, attempt=attempt)
    )


def test_nothing_is_kept_of_a_mask_that_was_not_finished(lied, monkeypatch):
    """The site dies while it masks."""

    def dies(vector, masks):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("fedveil.federation.secagg.mask_streams.add_masks", dies)
        with pytest.raises(SystemExit):
            lied.site.mask(lied.plan, lied.terms, drawn(4, 0))
    assert lied.site.store.load().live.plan == lied.plan.digest
    lied.refused("latest unused prekey")


def test_a_state_that_cannot_be_saved_lets_nothing_leave(lied):
    class Full(MemorySecAggStore):
        def save(self, kept):
            raise OSError("a full disk")

    store, vector = Full(), drawn(4, 1)
    store._kept = lied.site.store.load()
    with pytest.raises(OSError, match="full disk"):
        replace(lied.site, store=store).mask(lied.plan, lied.terms, vector)
    assert vector.tolist() == drawn(4, 1).tolist()


def test_what_a_site_keeps_is_as_much_as_it_needs_and_no_more(lied):
    private = lied.site.store.load().next.private
    attached = lied.site.mask(lied.plan, lied.terms, np.zeros(3, "<u4"))
    site_state = lied.site.store.load()
    text = site_state.to_bytes().decode()
    assert private not in text
    assert attached.next.number == 1 == site_state.number - 1
    assert crypto.public_key_of(bytes.fromhex(site_state.next.private)).hex() == attached.next.key
    assert site_state.live.rows.keys() == set(SITES)
    secrets = (private, site_state.next.private, *site_state.live.rows.values())
    assert not any(secret in attached.to_bytes().decode() for secret in secrets)
