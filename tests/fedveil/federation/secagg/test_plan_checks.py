"""Each rule of plan_checks.py and site.py with a real site: what is just inside it passes, and one step further not.

Each lie is told once more with its rule switched off, and then goes through: so no other rule makes up for it. The
lies that two rules refuse are listed in `TWO_RULES` with the second one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedveil.contract.entry_table import EntryTable
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.federation.secagg import crypto, derivations, plan_checks
from fedveil.federation.secagg.messages import AgreeRequest, KeysRequest, OpenRequest
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, agreed_text, list_digest
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.testing.lying_server import (
    CONFIG,
    GARBAGE,
    POISONED_BROADCAST,
    RUN,
    LyingServer,
    site_names,
    terms_of,
    with_fields,
)

SITE = "s00"
OTHER = "0" * 63 + "7"


def table_of(senders) -> str:
    """Return the text of a table in which these sites send the one entry."""
    return EntryTable(blocks={"w": tuple(senders)}, fewest=4).to_text()


def digest_of(table: str) -> str:
    return hashlib.sha256(table.encode()).hexdigest() if table else ""


TABLE = table_of(site_names(5))
LINES: list[dict[str, object]] = []  # of the audit logs of the last world's sites


class World:
    """Five sites with one roster, of which one may collude, and what an honest server would ask of the first."""

    def __init__(self, count: int = 5, inside: bool = True, **demands) -> None:
        self.inside = inside
        required = {"min_cohort": 3, "min_threshold": 3, "colluding": 1} | demands
        self.server = LyingServer(site_names(count))
        required.setdefault("roster", self.server.roster_digest)
        for name, site in self.server.sites.items():
            self.server.sites[name] = replace(site, demands=SiteRequirements(**required), audit_log=self.write)
        LINES.clear()
        self.site = self.server.sites[SITE]

    def write(self, event: str, about) -> None:
        LINES.append({**about, "event": event})

    def plan(self, **changes) -> AttemptPlan:
        return self.server.plan(**changes)

    def begin(self, plan: AttemptPlan, terms=None) -> bool:
        """Judge a plan and mask for it. Raises what the site raises."""
        terms = terms or terms_of(plan, self.server.roster)
        self.site.begin(plan, terms)
        return bool(self.site.mask(plan, terms, np.zeros(4, np.uint32)).rows)

    def begin_with(self, table: str, shown: str | None = None, has_table: bool = True, **changes) -> bool:
        """Judge a plan with a table of entries, of which the site is shown another text."""
        plan = self.plan(entries=digest_of(table), **changes)
        shown = table if shown is None else shown
        return self.begin(plan, terms_of(plan, self.server.roster, table=shown, has_table=has_table))

    def masked(self, table: str = "", **changes) -> AttemptPlan:
        """Return a plan for which all sites have masked."""
        plan = self.plan(entries=digest_of(table), **changes)
        for name in plan.cohort:
            assert self.server.mask(name, plan, terms_of(plan, self.server.roster, table=table))
        return plan

    def agree(self, plan: AttemptPlan, in_sum, site: str = SITE, table: str = "") -> bool:
        request = AgreeRequest(plan=plan, table=table, in_sum=tuple(in_sum))
        return bool(self.server.sites[site].agree(request).signature)

    def open(self, plan: AttemptPlan, in_sum, agreed=None, rows=None, site: str = SITE):
        return self.server.sites[site].open(
            OpenRequest(
                plan=plan,
                table="",
                in_sum=tuple(in_sum),
                agreed=self.server.certificate(plan, in_sum) if agreed is None else agreed,
                rows=self.server.rows(site, plan, in_sum) if rows is None else rows,
            )
        )

    def signed(self, plan: AttemptPlan, in_sum, count: int) -> dict[str, str]:
        """Return the signatures of a list by so many of its sites, this one last, whatever these would answer."""
        signers = sorted(in_sum, key=lambda name: name == SITE)[:count]
        text = agreed_text(plan, list_digest(plan.digest, in_sum))
        return {name: crypto.sign_bytes(self.server.sites[name].signing_key, text).hex() for name in signers}


def with_members(plan: AttemptPlan, **instead: Prekey) -> AttemptPlan:
    return with_fields(plan, members=[instead.get(m.site, m).model_dump() for m in plan.members])


def prekey_of(site: str, signing_key: bytes, key: bytes | None = None, run: str = RUN, number: int = 0) -> Prekey:
    unsigned = Prekey(
        site=site,
        signing_key=crypto.verifying_key(signing_key).hex(),
        number=number,
        key=(key or crypto.public_key_of(os.urandom(32))).hex(),
        signature="0" * 128,
    )
    return with_fields(unsigned, signature=crypto.sign_bytes(signing_key, unsigned.text(run)).hex())


@dataclass(frozen=True)
class Lie:
    """A request of one step outside a rule, or where `World.inside` is set one step inside."""

    rule: str
    tell: Callable[[bool], object]


LIES: dict[str, Lie] = {}


def lie(rule: str, name: str):
    def add(function):
        LIES[f"{rule.split()[0]}: {name}"] = Lie(rule, function)
        return function

    return add


# T1


def _add_terms_lies() -> None:
    outside = {
        "round": 1, "attempt": 1, "bits": 64, "most_weight": 2, "bound": 63.0, "noise": "sum",
        "least": 4, "colluding": 2, "threshold": 5, "neighbours": 4, "config": OTHER, "app": OTHER, "is_alike": False,
    }  # fmt: skip
    for name, value in outside.items():

        @lie("T1 require_terms", name)
        def tell(inside, name=name, value=value):
            world = World(inside=inside)
            plan = world.plan(app=CONFIG)
            changes = {} if inside else {name: value}
            return world.begin(plan, terms_of(plan, world.server.roster, **changes))


_add_terms_lies()


@lie("T1 require_terms", "run")
def tell_run(inside):
    world = World()
    plan = world.plan(run=RUN if inside else "another-run")
    return world.begin(plan, terms_of(plan, world.server.roster, run=RUN))


@lie("T1 require_terms", "a digest of a broadcast that differs by site")
def tell_broadcast(inside):
    world = World()
    plan = world.plan(broadcast="" if inside else POISONED_BROADCAST)
    return world.begin(plan, terms_of(plan, world.server.roster, is_alike=False))


@lie("T1 require_terms", "another bundle, by a site that determined its own")
def tell_app(inside):
    world = World()
    plan = world.plan(app=OTHER)
    return world.begin(plan, terms_of(plan, world.server.roster, app="" if inside else CONFIG))


@lie("T1 require_terms", "neighbors where the config has none")
def tell_neighbors(inside):
    world = World()
    plan = world.plan(neighbours=4)
    return world.begin(plan, terms_of(plan, world.server.roster, neighbours=4 if inside else 0))


# T2


@lie("T2 require_roster", "no roster")
def tell_no_roster(inside):
    world = World(**({"roster": ""} if inside else {}))
    return world.begin(world.plan(roster=""))


@lie("T2 require_roster", "another roster than the policy's")
def tell_other_roster(inside):
    world = World(**({"roster": ""} if inside else {}))
    keys = json.loads(world.server.roster)["signing_keys"] | {"stranger": OTHER}
    plan = world.plan(roster=roster_digest(keys))
    return world.begin(plan, terms_of(plan, SigningKeyRoster(signing_keys=keys).to_bytes().decode()))


@lie("T2 require_roster", "another text than the digest's")
def tell_roster_text(inside):
    world = World()
    keys = json.loads(world.server.roster)["signing_keys"] | ({} if inside else {"stranger": OTHER})
    plan = world.plan()
    return world.begin(plan, terms_of(plan, SigningKeyRoster(signing_keys=keys).to_bytes().decode()))


@lie("T2 require_roster", "a member's key that is not listed")
def tell_members_key(inside):
    world = World()
    plan = world.plan()
    stranger = prekey_of("s03", world.server.sites["s03"].signing_key if inside else b"\x09" * 32)
    return world.begin(with_members(plan, s03=stranger))


@lie("T2 require_own_key", "this site's name with another key in plan and roster")
def tell_own_key(inside):
    world = World(roster="")
    plan, listed = world.plan(), json.loads(world.server.roster)["signing_keys"]
    if not inside:
        other = prekey_of(SITE, b"\x09" * 32)
        plan, listed = with_members(plan, s00=other), listed | {SITE: other.signing_key}
    plan = with_fields(plan, roster=roster_digest(listed))
    return world.begin(plan, terms_of(plan, SigningKeyRoster(signing_keys=listed).to_bytes().decode()))


@lie("T2 require_distinct_keys", "a prekey under two names")
def tell_doubled_prekey(inside):
    world = World()
    plan = world.plan()
    key = None if inside else bytes.fromhex(plan.by_name["s01"].key)
    return world.begin(with_members(plan, s03=prekey_of("s03", world.server.sites["s03"].signing_key, key)))


@lie("T2 require_distinct_keys", "a signing key under two names")
def tell_doubled_signing_key(inside):
    world = World()
    if not inside:  # a roster that lists one site twice
        sites, listed = world.server.sites, json.loads(world.server.roster)["signing_keys"]
        sites["s04"] = replace(sites["s04"], signing_key=sites["s03"].signing_key)
        listed["s04"] = listed["s03"]
        world.server.roster = SigningKeyRoster(signing_keys=listed).to_bytes().decode()
        world.server.roster_digest = roster_digest(listed)
        world.site = replace(world.site, demands=replace(world.site.demands, roster=roster_digest(listed)))
    return world.begin(world.plan())


# T3, T4


@lie("T3 require_genuine_prekeys", "a prekey signed for another run")
def tell_prekey_of_run(inside):
    world = World()
    run = RUN if inside else "another-run"
    return world.begin(with_members(world.plan(), s03=prekey_of("s03", world.server.sites["s03"].signing_key, run=run)))


@lie("T3 require_genuine_prekeys", "a prekey signed by another site")
def tell_forged_prekey(inside):
    world = World()
    genuine = prekey_of("s03", world.server.sites["s03"].signing_key)
    forged = with_fields(genuine, signature=prekey_of("s03", b"\x09" * 32, bytes.fromhex(genuine.key)).signature)
    return world.begin(with_members(world.plan(), s03=genuine if inside else forged))


@lie("T3 require_genuine_prekeys", "a point of low order")
def tell_low_order(inside):
    world = World()
    key = None if inside else bytes([1, *[0] * 31])
    return world.begin(with_members(world.plan(), s03=prekey_of("s03", world.server.sites["s03"].signing_key, key)))


@lie("T4 require_unspent", "the prekey with which it has masked")
def tell_old_prekey(inside):
    world = World()
    before = world.masked()
    plan = world.plan(attempt=1)
    return world.begin(plan if inside else with_members(plan, s00=before.by_name[SITE]))


@lie("T4 require_unspent", "a prekey that it never announced")
def tell_unknown_prekey(inside):
    world = World()
    plan = world.plan()
    unknown = prekey_of(SITE, world.site.signing_key)
    return world.begin(plan if inside else with_members(plan, s00=unknown))


# T5


def _add_number_lies() -> None:
    inside_and_outside = {
        "fewer colluding than the policy's": (5, {"colluding": 1}, {"colluding": 0}, {}),
        "2 q = m + c": (5, {"quorum": 4, "threshold": 4}, {"quorum": 3, "threshold": 3}, {}),
        "more in a sum than in the cohort": (5, {"least": 5}, {"least": 6}, {}),
        "a small cohort": (6, {}, {"cohort": site_names(5)}, {"min_cohort": 6, "least": 6}),
        "small sums": (5, {"least": 5}, {"least": 4}, {"min_cohort": 5}),
        "one honest site in a sum": (
            4, {"colluding": 2, "quorum": 4, "threshold": 4}, {"colluding": 2, "cohort": site_names(3)}, {},
        ),
        "a low quorum": (5, {"quorum": 5, "threshold": 5}, {"quorum": 4, "threshold": 4}, {"min_threshold": 5}),
        "few shares": (5, {"neighbours": 4, "threshold": 4}, {"neighbours": 4, "threshold": 3}, {"min_threshold": 4}),
        "noise of nobody": (
            6, {"colluding": 2, "least": 3, "noise": "sum"}, {"colluding": 2, "least": 2, "noise": "sum"}, {},
        ),
    }  # fmt: skip
    for name, (count, within, beyond, demands) in inside_and_outside.items():

        @lie("T5 require_numbers", name)
        def tell(inside, count=count, within=within, beyond=beyond, demands=demands):
            demands = dict(demands)
            least = {"least": demands.pop("least")} if "least" in demands else {}
            return (world := World(count, **demands)).begin(world.plan(**(least | (within if inside else beyond))))


_add_number_lies()


# T6


@lie("T6 require_graph", "fewer shares than signatures with all pairs")
def tell_few_shares(inside):
    return (world := World()).begin(world.plan(threshold=4 if inside else 3))


@lie("T6 require_graph", "more shares than signatures with all pairs")
def tell_many_shares(inside):
    return (world := World()).begin(world.plan(threshold=4 if inside else 5))


@lie("T6 require_connected", "as many shares as may collude")
def tell_shares_of_colluders(inside):
    world = World(7, min_threshold=2)
    return world.begin(world.plan(neighbours=4, threshold=3 if inside else 2, colluding=2))


# T7, T11


@lie("T7 require_later", "an older attempt")
def tell_older_attempt(inside):
    world = World()
    world.masked(attempt=2)
    return world.begin(world.plan(attempt=3 if inside else 1))


@lie("T7 require_later", "an older round")
def tell_older_round(inside):
    world = World()
    world.masked(round_=2)
    return world.begin(world.plan(round_=3 if inside else 1, attempt=5))


@lie("T7 require_later", "the same attempt with a new prekey")
def tell_same_attempt(inside):
    world = World()
    world.masked()
    return world.begin(world.plan(attempt=1 if inside else 0))


@lie("T7 require_later", "the round of a list that it signed")
def tell_signed_round(inside):
    world = World()
    plan = world.masked()
    if not inside:
        world.agree(plan, site_names(4))
    return world.begin(world.plan(attempt=1))


@lie("T7 require_later", "the round of a list that it opened")
def tell_opened_round(inside):
    world = World()
    plan = world.masked()
    if not inside:
        world.open(plan, site_names(5))
    return world.begin(world.plan(attempt=1))


@lie("T7 require_later", "a second attempt with a table of entries")
def tell_table_twice(inside):
    world = World()
    world.masked(**({} if inside else {"table": TABLE}))
    return world.begin_with(TABLE, attempt=1)


@lie("T8 require_entries", "another table than the plan's")
def tell_other_table(inside):
    return World().begin_with(TABLE, shown=TABLE if inside else table_of(site_names(4)))


@lie("T8 require_entries", "a table for a method whose sites all send the same")
def tell_needless_table(inside):
    return World().begin_with(TABLE, has_table=inside)


@lie("T8 require_entries", "a table that the plan does not name")
def tell_unnamed_table(inside):
    return World().begin_with("", shown="" if inside else TABLE, has_table=False)


@lie("T8 require_entries", "no table for a method whose sites send different entries")
def tell_no_table(inside):
    world = World()
    plan = world.plan()
    return world.begin(plan, terms_of(plan, world.server.roster, has_table=not inside))


@lie("T8 require_entries", "an entry that too few of the cohort send")
def tell_thin_entry(inside):
    return World().begin_with(table_of(site_names(4 if inside else 3)))


@lie("A5 require_entries_of_sum", "another table at the list than at the plan")
def tell_other_table_of_sum(inside):
    world = World()
    plan = world.masked(table=TABLE)
    return world.agree(plan, site_names(5), table=TABLE if inside else table_of(site_names(4)))


@lie("T11 require_continued_state", "beginning anew after going on")
def tell_new_state(inside):
    world = World()
    for round_, state in ((0, "begins"), (1, "begins"), (2, "continues"), (3, "continues" if inside else "begins")):
        plan = world.plan(round_=round_)
        passed = world.begin(plan, terms_of(plan, world.server.roster, state=state))
    return passed


# A1 to A4


@lie("A1 _live", "a list of a decoy plan")
def tell_decoy(inside):
    world = World()
    plan = world.masked()
    return world.agree(plan if inside else with_fields(plan, attempt=7), site_names(5))


@lie("O1 _live", "the shares of a decoy plan")
def tell_decoy_open(inside):
    world = World()
    plan = world.masked()
    return world.open(plan if inside else with_fields(plan, round=7), site_names(5))


@lie("A1 _live", "a list of the plan before")
def tell_plan_before(inside):
    world = World()
    plan = world.masked()
    after = world.masked(attempt=1)
    return world.agree(after if inside else plan, site_names(5))


@lie("A2 _save_agreed", "a second list")
def tell_second_list(inside):
    world = World()
    plan = world.masked()
    world.agree(plan, site_names(4))
    return world.agree(plan, site_names(4) if inside else site_names(5))


@lie("A3 require_listed", "a list without this site")
def tell_list_without(inside):
    world = World()
    return world.agree(world.masked(), site_names(5)[:4] if inside else site_names(5)[1:])


@lie("A3 require_listed", "a short list")
def tell_short_list(inside):
    world = World()
    return world.agree(world.masked(), site_names(4 if inside else 3))


@lie("A3 require_listed", "a list below the plan's least")
def tell_list_below_least(inside):
    world = World()
    return world.agree(world.masked(least=5), site_names(5 if inside else 4))


@lie("A3 require_listed", "a stranger in the list")
def tell_stranger(inside):
    world = World()
    return world.agree(world.masked(), [*site_names(4), "s04" if inside else "zoe"])


@lie("A3 require_listed", "a name twice")
def tell_name_twice(inside):
    world = World()
    return world.agree(world.masked(), [*site_names(3), "s03" if inside else "s02"])


@lie("A3 require_listed", "shares for a short list")
def tell_open_short(inside):
    world = World()
    plan = world.masked(least=5)
    in_sum = site_names(5 if inside else 4)
    return world.open(plan, in_sum, world.signed(plan, in_sum, 4))


def around(plan: AttemptPlan, near: int) -> list[str]:
    """Return the list without the two sites of one window of the circle, and `near` of the other one's."""
    at = plan.circle.index(SITE)
    turned = plan.circle[at:] + plan.circle[:at]
    return sorted(set(turned) - {*turned[3:5], *turned[9 : 11 - near]})


@lie("A4 require_connected", "a list that one site can cut in two")
def tell_cut_list(inside):
    world = World(12, min_threshold=2)
    plan = world.masked(neighbours=4, threshold=2, quorum=7)
    return world.agree(plan, around(plan, 2 if inside else 0))


@lie("A4 require_connected", "a list in which a site has too few holders")
def tell_few_holders(inside):
    world = World(12, min_threshold=2)
    plan = world.masked(neighbours=4, threshold=3, quorum=7)
    absent = plan.partners(SITE)[: 1 if inside else 2]
    return world.agree(plan, sorted(set(plan.cohort) - set(absent)))


# O2 to O5


@lie("O2 _save_agreed", "shares for another list than the signed one")
def tell_other_open(inside):
    world = World()
    plan = world.masked()
    world.server.agree(SITE, plan, site_names(4))
    if inside:
        agreed = world.signed(plan, site_names(4), 3) | world.server.certificate(plan, site_names(4))
        return world.open(plan, site_names(4), agreed)
    return world.open(plan, site_names(5))


@lie("O3 require_certificate", "q - 1 signatures")
def tell_few_signatures(inside):
    world = World()
    plan = world.masked()
    world.agree(plan, site_names(4))
    agreed = world.signed(plan, site_names(4), 3)
    agreed[SITE] = world.server.sites[SITE].agree(AgreeRequest(plan=plan, table="", in_sum=site_names(4))).signature
    if not inside:
        del agreed["s03"]
    return world.open(plan, site_names(4), agreed)


@lie("O3 require_certificate", "one signature under two names")
def tell_signature_twice(inside):
    world = World()
    plan = world.masked()
    agreed = world.signed(plan, site_names(4), 3)
    world.server.agree(SITE, plan, site_names(4))
    agreed |= world.server.certificate(plan, site_names(4)) if inside else {SITE: agreed["s01"]}
    return world.open(plan, site_names(4), agreed)


@lie("O3 require_certificate", "a signer outside the list")
def tell_outside_signer(inside):
    world = World()
    plan = world.masked()
    agreed = world.signed(plan, site_names(4), 3)
    text = agreed_text(plan, list_digest(plan.digest, site_names(4)))
    fourth = SITE if inside else "s04"
    agreed[fourth] = crypto.sign_bytes(world.server.sites[fourth].signing_key, text).hex()
    return world.open(plan, site_names(4), agreed)


@lie("O3 require_certificate", "signatures of another round")
def tell_old_signatures(inside):
    world = World()
    before = world.masked()
    old = world.signed(before, site_names(4), 3)
    plan = world.masked(round_=1)
    agreed = world.signed(plan, site_names(4), 3) if inside else old
    text = agreed_text(plan, list_digest(plan.digest, site_names(4)))
    agreed[SITE] = crypto.sign_bytes(world.site.signing_key, text).hex()
    return world.open(plan, site_names(4), agreed)


@lie("O3 require_certificate", "the whole cohort with neighbors, unsigned")
def tell_unsigned_with_neighbors(inside):
    world = World()
    plan = world.masked(neighbours=4)
    return world.open(plan, site_names(5), world.signed(plan, site_names(5), 4) if inside else {})


@lie("O4 require_rows", "the row of a silent site")
def tell_silent_row(inside):
    world = World()
    plan = world.masked()
    in_sum = site_names(4)
    world.server.agree(SITE, plan, in_sum)
    agreed = world.signed(plan, in_sum, 4)
    rows = world.server.rows(SITE, plan, in_sum if inside else site_names(5))
    return world.open(plan, in_sum, agreed, rows)


@lie("O4 require_rows", "a row too few")
def tell_missing_row(inside):
    world = World()
    plan = world.masked()
    rows = world.server.rows(SITE, plan, site_names(5))
    if not inside:
        del rows["s03"]
    return world.open(plan, site_names(5), rows=rows)


@lie("boot _load", "a plan of another boot")
def tell_old_boot(inside):
    world = World()
    plan = world.masked()
    world.server.boots[SITE] = "boot-0" if inside else "boot-1"
    return world.open(plan, site_names(5))


# What refuses a lie when its own rule is off.
TWO_RULES = {
    "T1: run": "T3: the prekeys are signed for the run",
    "T2: this site's name with another key in plan and roster": "T4: its own entry is its own prekey",
    "T3: a point of low order": "crypto.exchange_keys",
}


def remembers_nothing(self, state, plan, live) -> None:
    """Save the fence alone: the site no longer knows to which list it agreed."""
    self.store.save(state.model_copy(update={"fence": state.fence.model_copy(update={"signed": plan.round})}))


def load_of_any_boot(self):
    return self.store.load() or SiteSecAggState()


SWITCHES = {
    "_live": lambda self, state, plan: state.live,
    "_save_agreed": remembers_nothing,
    "_load": load_of_any_boot,
}


def switch_off(monkeypatch, rule: str) -> None:
    function = rule.split()[1]
    if function in SWITCHES:
        monkeypatch.setattr(SecAggSite, function, SWITCHES[function])
    else:
        monkeypatch.setattr(plan_checks, function, lambda *args: None)


@pytest.mark.parametrize("name", LIES)
def test_passes_just_inside(name):
    assert LIES[name].tell(True)


@pytest.mark.parametrize("name", LIES)
def test_refuses_the_lie(name):
    with pytest.raises((PolicyError, WireError)) as caught:
        LIES[name].tell(False)
    assert len(str(caught.value)) > 20
    rule, (refusal, *others) = LIES[name].rule.split()[0], [ln for ln in LINES if ln["event"] == "sum-refused"]
    assert not others
    assert refusal["rule"] == {"boot": "O1"}.get(rule, rule)
    assert refusal["reason"] == f"{type(caught.value).__name__}: {caught.value}"
    assert refusal["run"] == RUN or name == "T1: run"
    assert refusal["request"] in {"A": ("agree", "open"), "O": ("open",), "b": ("open",)}.get(rule[0], ("mask",))


@pytest.mark.parametrize("name", [name for name in LIES if name not in TWO_RULES])
def test_lie_goes_through_without_its_rule(name, monkeypatch):
    switch_off(monkeypatch, LIES[name].rule)
    assert LIES[name].tell(False)


@pytest.mark.parametrize("name", TWO_RULES)
def test_second_rule_refuses_without_the_first(name, monkeypatch):
    switch_off(monkeypatch, LIES[name].rule)
    with pytest.raises((PolicyError, WireError)):
        LIES[name].tell(False)


def test_every_rule_has_a_lie():
    rules = {name for name in vars(plan_checks) if name.startswith("require_")}
    assert rules == {entry.rule.split()[1] for entry in LIES.values()} & rules


def test_an_entry_of_too_few_sites_of_a_list_is_refused():
    """With T8 and A3 no list can have one: of 5 sites, 4 send each entry, so each list of 4 has 3 of them."""
    table = table_of(site_names(3))
    plan = World().plan(entries=digest_of(table))
    plan_checks.require_entries_of_sum(plan, table, site_names(5))
    with pytest.raises(PolicyError, match="expected none or at least 3 sites in the sum, found 2; no share"):
        plan_checks.require_entries_of_sum(plan, table, site_names(5)[1:])


def test_keys_of_another_run_are_refused():
    site = World().site
    assert site.ready(KeysRequest(run=RUN)).prekey.is_genuine(RUN)
    with pytest.raises(PolicyError, match=RUN):
        site.ready(KeysRequest(run="another-run"))


def test_lost_round_without_state_does_not_stop_a_new_beginning():
    world = World()
    for attempt in range(2):
        plan = world.plan(attempt=attempt)
        assert world.begin(plan, terms_of(plan, world.server.roster, state="begins"))
    plan = world.plan(round_=1)
    assert world.begin(plan, terms_of(plan, world.server.roster, state="begins"))
    assert not world.site.store.load().fence.kept


def test_sum_may_need_fewer_sites_than_collude_if_the_quorum_does_not():
    world = World(7)
    numbers = {"colluding": 4, "quorum": 6, "threshold": 6, "least": 3}
    with pytest.raises(PolicyError, match="whose noise counts"):
        world.begin(world.plan(**numbers, noise="sum"))
    assert world.begin(world.plan(**numbers, noise="site"))


def test_boot_id_that_cannot_be_read_is_found_before_training():
    world = World()

    def unreadable() -> str:
        raise StateError("boot_id: expected to read it")

    plan = world.plan()
    with pytest.raises(StateError, match="boot_id"):
        replace(world.site, boot=unreadable).begin(plan, terms_of(plan, world.server.roster))


@pytest.mark.parametrize("wrong", ["plan", "holder", "dealer", "length", "garbage"])
def test_a_row_that_is_not_this_holders_is_left_out(wrong):
    """Names and plan are in key and context of a row, and each plan has new prekeys: no single rule can be off."""
    world = World()
    before = world.masked()
    earlier = world.server.rows(SITE, before, site_names(5))
    plan = world.masked(attempt=1)
    rows = world.server.rows(SITE, plan, site_names(5))
    good = rows["s02"]
    rows["s02"] = {
        "plan": earlier["s02"],
        "holder": world.server.rows("s01", plan, site_names(5))["s02"],
        "dealer": rows["s03"],
        "length": good[:-32],
        "garbage": GARBAGE,
    }[wrong]
    answer = world.open(plan, site_names(5), rows=rows)
    assert answer.unread == ("s02",)
    assert set(answer.own) == set(site_names(5)) - {"s02"}
    assert answer.pairs == {}


def test_a_row_is_bound_to_plan_dealer_and_holder():
    key, shares = b"\x07" * 32, [b"\x01" * 16, b"\x02" * 16]
    row = derivations.encrypt_row(key, shares, CONFIG, "a", "b")
    assert derivations.decrypt_row(key, row, 2, CONFIG, "a", "b") == shares
    for context in ((OTHER, "a", "b"), (CONFIG, "b", "a"), (CONFIG, "a", "c")):
        with pytest.raises(WireError):
            derivations.decrypt_row(key, row, 2, *context)
    shared = b"\x08" * 32
    keys = [derivations.row_key(shared, p, i, h) for p in (CONFIG, OTHER) for i, h in (("a", "b"), ("b", "a"))]
    secrets = [derivations.pair_secret(shared, p, "a", "b") for p in (CONFIG, OTHER)]
    assert len({*keys, *secrets}) == 6


def test_answer_of_an_opening_has_no_share_of_silent_sites_own_masks():
    world = World()
    plan = world.masked()
    world.server.agree(SITE, plan, site_names(4))
    answer = world.open(plan, site_names(4), world.signed(plan, site_names(4), 4))
    assert set(answer.own) == set(site_names(4))
    assert {site: set(pairs) for site, pairs in answer.pairs.items()} == {site: {"s04"} for site in site_names(4)}
