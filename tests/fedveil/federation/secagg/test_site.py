"""A server that lies before anything is masked: what a site refuses to join, and to mask for."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.membership import roster_digest
from fedveil.federation.secagg.messages import MembershipRequest, PrekeyRequest
from fedveil.federation.secagg.site import SecAggSite, SiteRequirements
from fedveil.federation.secagg.state import MemorySecAggStore
from tests.fedveil.federation.secagg.sites import RUN, changed, drawn, names, run, signed, stranger

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
    """Five sites, and what an honest server would ask them: the parts of a lie."""

    def __init__(self, demands: SiteRequirements = SiteRequirements(), **settings) -> None:
        self.local = run(SITES, demands, **settings)
        self.site, self.coordinator = self.local.sites["s00"], self.local.coordinator
        for name, site in self.local.sites.items():
            self.coordinator.admit(name, site.hello(self.coordinator.hello()))
        self.setup = self.coordinator.settle_on(SITES)

    def key(self, name: str) -> bytes:
        return self.local.sites[name].signing_key

    def members(self, **instead) -> PrekeyRequest:
        """The setup with other members."""
        members = [instead.get(m.name, m).model_dump() for m in self.setup.membership.members]
        return changed(self.setup, membership=self.setup.membership.model_dump() | {"members": members})

    def plan(self):
        for name, site in self.local.sites.items():
            self.coordinator.keep(name, site.join(self.setup))
        return self.coordinator.attempt(3, 0, SITES).plan

    def prekeys(self, plan, **instead):
        """The plan with other prekeys; None leaves a site out."""
        prekeys = [instead.get(p.site, p) for p in plan.prekeys]
        return changed(plan, prekeys=[p.model_dump() for p in prekeys if p is not None])


@pytest.fixture
def lied() -> Lied:
    return Lied()


def refused(site: SecAggSite, setup: PrekeyRequest, match: str, kind=PolicyError) -> None:
    before = site.store.load()
    with pytest.raises(kind, match=match):
        site.join(PrekeyRequest.from_bytes(setup.to_bytes()))
    assert site.store.load() == before


def no_mask(site: SecAggSite, plan, match: str, kind=PolicyError) -> None:
    before, vector = site.store.load(), drawn(4, 1)
    for ask in (site.begin, lambda plan: site.mask(plan, vector)):
        with pytest.raises(kind, match=match):
            ask(plan)
    assert site.store.load() == before
    assert vector.tolist() == drawn(4, 1).tolist()


def test_another_run(lied):
    with pytest.raises(PolicyError, match="run"):
        lied.site.hello(MembershipRequest(run="another"))
    membership = changed(lied.setup.membership, run="another")
    refused(lied.site, changed(lied.setup, membership=membership.model_dump()), "run")
    no_mask(lied.site, changed(lied.plan(), run="another"), "run")


def test_keys_are_made_once_and_never_without_being_asked(lied):
    assert lied.site.hello(MembershipRequest(run=RUN)) == lied.site.hello(MembershipRequest(run=RUN))
    new = SecAggSite(RUN, "s00", stranger(), MemorySecAggStore())
    refused(new, lied.setup, "it was lost")
    with pytest.raises(PolicyError, match="it was lost"):
        new.begin(lied.plan())


def test_a_membership_without_the_site_or_with_another_key_of_its(lied):
    without = [m.model_dump() for m in lied.setup.membership.members[1:]]
    smaller = lied.setup.membership.model_dump() | {"members": without, "threshold": 3}
    refused(lied.site, changed(lied.setup, membership=smaller), "own run key")
    new = SecAggSite(RUN, "s00", lied.key("s00"), MemorySecAggStore()).hello(
        MembershipRequest(run=RUN)
    )  # before it lost its keys
    refused(lied.site, lied.members(s00=new), "own run key")


def test_a_run_key_that_its_owner_did_not_sign(lied):
    member = lied.setup.membership.by_name["s03"]
    forged = changed(member, run_key=crypto.public_key_of(stranger()).hex())
    refused(lied.site, lied.members(s03=forged), "run key of s03", WireError)
    other_run = signed(member, lied.key("s03"), member.text("another"))
    refused(lied.site, lied.members(s03=other_run), "run key of s03", WireError)
    other_site = signed(member, lied.key("s04"), member.text(RUN))
    refused(lied.site, lied.members(s03=other_site), "run key of s03", WireError)


@pytest.mark.parametrize("u", POINTS)
def test_points_of_low_order(lied, u):
    member = changed(lied.setup.membership.by_name["s03"], run_key=low_order(u))
    refused(lied.site, lied.members(s03=signed(member, lied.key("s03"), member.text(RUN))), "run key of s03", WireError)
    plan = lied.plan()
    prekey = changed(plan.prekey_of("s03"), key=low_order(u))
    prekey = signed(prekey, lied.key("s03"), prekey.text(plan.membership))
    no_mask(lied.site, lied.prekeys(plan, s03=prekey), "prekey of s03", WireError)


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_threshold_of_not_more_than_half(lied, threshold):
    membership = changed(lied.setup.membership, threshold=threshold)
    refused(lied.site, changed(lied.setup, membership=membership.model_dump()), "secure.threshold")


def test_a_threshold_below_the_policys():
    lied = Lied(SiteRequirements(min_threshold=5))
    refused(lied.site, lied.setup, "permits at least 5 of 5 holders, found 4")


def test_a_roster_that_is_not_theirs_or_a_member_that_is_not_on_it():
    honest = Lied()
    roster = honest.setup.roster
    required = SiteRequirements(roster=roster_digest(roster))
    sites_by_name = {
        name: SecAggSite(RUN, name, site.signing_key, site.store, required) for name, site in honest.local.sites.items()
    }
    site = sites_by_name["s00"]
    site.join(honest.setup)
    foreign = stranger()
    public = crypto.verifying_key(foreign).hex()
    refused(site, changed(honest.setup, roster=roster | {"s03": public}), "fedveil members roster")
    refused(site, changed(honest.setup, roster=dict(list(roster.items())[:4])), "fedveil members roster")
    member = honest.setup.membership.by_name["s03"]
    swapped = changed(member, signing_key=public)
    swapped = signed(swapped, foreign, swapped.text(RUN))
    refused(site, honest.members(s03=swapped), "signing key of s03")
    honest.site.join(honest.members(s03=swapped))  # without a roster it cannot know


def test_the_roster_digest_tells_every_name_and_key():
    one = roster_digest({"a": "0" * 64, "b": "1" * 64})
    assert one == roster_digest({"b": "1" * 64, "a": "0" * 64})
    assert (
        len({one, roster_digest({"a": "1" * 64, "b": "0" * 64}), roster_digest({"a": "0" * 64}), roster_digest({})})
        == 4
    )


def test_a_plan_of_another_membership(lied):
    plan = lied.plan()
    no_mask(lied.site, changed(plan, membership="0" * 64), "membership")


@pytest.mark.parametrize(
    ("settings", "sites"), [({"least": 2}, SITES), ({"least": 4}, SITES[:3]), ({"least": 1}, SITES[:3])]
)
def test_a_cohort_or_a_sum_below_the_sites_own(settings, sites):
    lied = Lied(SiteRequirements(min_cohort=4))
    plan = changed(lied.plan(), **settings)
    no_mask(lied.site, lied.prekeys(plan, **dict.fromkeys(set(SITES) - set(sites))), "secure.min-sites")


def test_one_site_alone_is_no_sum_whatever_the_policy_says():
    lied = Lied(SiteRequirements(min_cohort=0))
    plan = changed(lied.plan(), least=1)
    no_mask(lied.site, plan, "secure.min-sites")
    no_mask(lied.site, lied.prekeys(plan, s01=None, s02=None, s03=None, s04=None), "secure.min-sites")


def test_a_prekey_with_a_wrong_signature_or_for_another_membership(lied):
    plan = lied.plan()
    prekey = plan.prekey_of("s03")
    for forged in (
        changed(prekey, key=crypto.public_key_of(stranger()).hex()),
        changed(prekey, number=9),
        changed(prekey, shares="0" * 64),
        signed(prekey, stranger(), prekey.text(plan.membership)),
        signed(prekey, lied.key("s04"), prekey.text(plan.membership)),
        signed(prekey, lied.key("s03"), prekey.text("0" * 64)),
    ):
        no_mask(lied.site, lied.prekeys(plan, s03=forged), "prekey of s03", WireError)


def test_a_prekey_of_one_that_is_no_member(lied):
    plan, foreign = lied.plan(), stranger()
    prekey = changed(plan.prekey_of("s04"), site="s05")
    prekey = signed(prekey, foreign, prekey.text(plan.membership))
    no_mask(lied.site, changed(plan, prekeys=[*(p.model_dump() for p in plan.prekeys), prekey.model_dump()]),
            "prekey of s05", WireError)  # fmt: skip


def test_its_own_prekey_left_out_or_an_older_one(lied):
    plan = lied.plan()
    no_mask(lied.site, lied.prekeys(plan, s00=None), "this site's last prekey")
    lied.coordinator.keep("s00", lied.site.join(lied.setup))
    no_mask(lied.site, plan, "this site's last prekey")


@pytest.mark.parametrize("change", [{}, {"attempt": 1}, {"round": 4}, {"bound": 2.0}, {"bits": 64}])
def test_a_prekey_masks_once_whatever_the_plan_is_called(lied, change):
    plan = lied.plan()
    lied.site.mask(plan, drawn(4, 0))
    no_mask(lied.site, changed(plan, **change), "last prekey, unused")


def test_a_prekey_is_spent_before_anything_of_it_leaves(lied, monkeypatch):
    """The site dies while it masks."""
    plan = lied.plan()

    def dies(vector, masks):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("fedveil.federation.secagg.mask_streams.add_masks", dies)
        with pytest.raises(SystemExit):
            lied.site.mask(plan, drawn(4, 0))
    no_mask(lied.site, plan, "last prekey, unused")


def test_what_a_site_keeps_is_as_much_as_it_needs_and_no_more(lied):
    plan = lied.plan()
    seed = lied.site.store.load().seed
    attached = lied.site.mask(plan, np.zeros(3, "<u4"))
    site_state = lied.site.store.load()
    assert site_state.seed != seed
    assert seed not in site_state.to_bytes().decode()
    assert attached.next.prekey.number == 1 == site_state.prekeys - 1
    assert (
        crypto.public_key_of(crypto.private_key_from(bytes.fromhex(site_state.seed))).hex() == attached.next.prekey.key
    )
    assert not any(secret in attached.to_bytes().decode() for secret in (seed, site_state.seed, site_state.run_key))
