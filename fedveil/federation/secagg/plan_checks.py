"""The rules by which a site checks a plan, a sum's list of sites, and a request for its shares.

Each rule is one function, with a test that fails without it. The rule numbers come from the protocol description in
docs/deploy/secure-aggregation.md. All raise PolicyError, or WireError if the server contradicts its own instruction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedveil.contract.entry_table import EntryTable
from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.federation.secagg import crypto, graph_connectivity
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, agreed_text, quorum_of
from fedveil.federation.secagg.refusals import number_refusals
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.schema import ALL_PAIRS
from fedveil.federation.secagg.state import SiteSecAggState

NO_STATE: Literal["none"] = "none"
StateUse = Literal["none", "begins", "continues"]  # how this client round uses the method's private state


@dataclass(frozen=True)
class SiteRequirements:
    """The conditions under which a site takes part in a run's sums.

    Attributes:
        min_cohort: minimum number of sites in a cohort, and in a sum.
        min_threshold: minimum number of signatures on a list, and of shares that reveal a secret.
        roster: digest of the federation's signing keys; "" means that the site trusts the keys that the
            server names.
        colluding: number of sites that may collude with a lying server; a plan must withstand as many.
    """

    min_cohort: int = 2
    min_threshold: int = 1
    roster: str = ""
    colluding: int = 0


@dataclass(frozen=True)
class RoundTerms:
    """A client round's terms that a site knows independently of the plan: instruction, run config, its own bundle.

    Attributes:
        threshold, neighbours: settings in the run config; 0 = derived from the cohort's size.
        app: SHA-256 of the bundle as determined by this site; "" if it was not determined.
        config: digest of the run config, the method and its fields, as computed by this site.
        roster: text of the federation's signing keys that came with the plan; "" = none.
        table: text of the table of entries that came with the plan; "" = none.
        has_table: whether sites send different entries, as assigned by such a table.
        is_alike: whether the method sends every site in an attempt the same message.
        state: whether the client round continues from private state.
        is_whole: whether the run reveals only sums over whole cohorts.
    """

    run: str
    round: int
    attempt: int
    bits: int
    most_weight: int
    bound: float
    noise: str
    least: int
    colluding: int
    threshold: int
    neighbours: int
    config: str
    app: str = ""
    roster: str = ""
    table: str = ""
    has_table: bool = False
    is_alike: bool = True
    state: StateUse = NO_STATE
    is_whole: bool = False

    @cached_property
    def entry_table(self) -> EntryTable | None:
        """Return the table of entries, which the plan names by digest, or None if none was sent. Raises WireError."""
        return EntryTable.from_text(self.table) if self.table else None


@number_refusals("T1")
def require_terms(plan: AttemptPlan, terms: RoundTerms) -> None:
    """T1. The plan matches the instruction and the run config."""
    quorum = 0 if terms.is_whole else quorum_of(terms.threshold, len(plan.members), terms.colluding)
    found = {
        "run": plan.run, "round": plan.round, "attempt": plan.attempt, "bits": plan.bits,
        "most_weight": plan.most_weight, "bound": plan.bound, "noise": plan.noise, "least": plan.least,
        "colluding": plan.colluding, "quorum": plan.quorum, "config": plan.config,
        "app": plan.app if terms.app else "", "broadcast": bool(plan.broadcast),
    }  # fmt: skip
    expected = {
        "run": terms.run, "round": terms.round, "attempt": terms.attempt, "bits": terms.bits,
        "most_weight": terms.most_weight, "bound": terms.bound, "noise": terms.noise, "least": terms.least,
        "colluding": terms.colluding, "quorum": quorum,
        "config": terms.config, "app": terms.app, "broadcast": terms.is_alike,
    }  # fmt: skip
    for name, value in expected.items():
        if found[name] != value:
            raise WireError(
                f"secure plan: {name}: expected {value}, from the instruction and the run config, found {found[name]}"
            )
    degree = terms.neighbours if terms.neighbours < len(plan.members) else 0
    if plan.neighbours != degree and (degree or len(plan.members) <= ALL_PAIRS or not plan.neighbours):
        raise WireError(f"secure plan: neighbours: expected {degree}, found {plan.neighbours}")


@number_refusals("T2")
def require_roster(plan: AttemptPlan, terms: RoundTerms, demands: SiteRequirements) -> None:
    """T2, for the roster. It is the one named in the site's policy, and lists every member's signing key."""
    if demands.roster and plan.roster != demands.roster:
        raise PolicyError(
            f"roster: this site permits {demands.roster}, found {plan.roster or 'none'}; compare it with the other "
            "sites: fedveil members roster"
        )
    if not plan.roster:
        return
    listed = SigningKeyRoster.from_bytes(terms.roster.encode()).signing_keys
    if roster_digest(listed) != plan.roster:
        raise WireError("secure plan: roster: the roster does not have the digest that the plan names")
    for member in plan.members:
        if listed.get(member.site) != member.signing_key:
            raise PolicyError(f"roster: the plan has a different signing key for {member.site} than the roster lists")


@number_refusals("T2")
def require_own_key(plan: AttemptPlan, terms: RoundTerms, site: str, signing_key: str) -> None:
    """T2, for the site itself. The plan and the roster list its own signing key under its name.

    Sites that agree on one roster can trust all its keys only if each site has found its own key in it.
    """
    own = plan.by_name.get(site)
    if own is None:
        raise WireError("secure plan: its cohort does not contain this site")
    listed = SigningKeyRoster.from_bytes(terms.roster.encode()).signing_keys.get(site) if plan.roster else signing_key
    for where, key in (("the plan", own.signing_key), ("the roster", listed)):
        if key != signing_key:
            raise PolicyError(
                f"signing-key: {where} lists {(key or 'none')[:16]} for this site, whose own key is "
                f"{signing_key[:16]}...; register it, and write the roster again"
            )


@number_refusals("T2")
def require_distinct_keys(plan: AttemptPlan) -> None:
    """T2, for all sites. No signing key or prekey is listed under two names."""
    for keys in ([m.signing_key for m in plan.members], [m.key for m in plan.members]):
        if len(set(keys)) < len(keys):
            raise WireError("secure plan: a key is listed under two names")


@number_refusals("T3")
def require_genuine_prekeys(plan: AttemptPlan) -> None:
    """T3. Every prekey is signed by its site for this run, and is fit for key agreement."""
    for member in plan.members:
        if not member.is_genuine(plan.run):
            raise WireError(f"secure plan: the prekey of {member.site} is invalid, or not signed by {member.site}")


@number_refusals("T4")
def require_unspent(plan: AttemptPlan, site: str, unspent: Prekey | None) -> None:
    """T4. The plan has this site's latest prekey, which it has not yet used for masking."""
    if unspent is None or plan.by_name[site] != unspent:
        raise PolicyError(
            "secure: the plan does not contain this site's latest unused prekey; request a new prekey for each attempt"
        )


@number_refusals("T5")
def require_numbers(plan: AttemptPlan, demands: SiteRequirements) -> None:
    """T5. The plan's numbers withstand as many colluding sites as it names, and are not below the policy's minimums.

    If only the whole cohort's sum can be revealed, no site signs a list, so a policy with a min-threshold refuses.
    """
    sites, quorum, colluding = len(plan.members), plan.quorum, plan.colluding
    least = plan.least_in_sum
    required: tuple[tuple[str, int, int], ...] = (
        ("secure.max-colluders", colluding, demands.colluding),
        *(() if plan.is_whole else (("secure.threshold: 2 q", 2 * quorum, sites + colluding + 1),)),
        ("secure.min-sites: sites of the cohort", sites, plan.least),
        ("secure.threshold: sites of the cohort", sites, quorum),
        ("min-cohort: sites of the cohort", sites, demands.min_cohort),
        ("min-cohort: sites in a sum", least, demands.min_cohort),
        ("secure.min-sites: honest sites in a sum", least - colluding, 2),
    )
    if not plan.is_whole or demands.min_threshold > 1:
        required += (
            ("min-threshold: quorum", quorum, demands.min_threshold),
            ("min-threshold: shares that open a secret", plan.threshold, demands.min_threshold),
        )
    if plan.noise == "sum":
        required += (("secure.min-sites: honest sites whose noise counts", plan.least - colluding, 1),)
    keys = "secure.min-sites" if plan.is_whole else "secure.threshold, secure.min-sites"  # the former has no shares
    for name, found, least_permitted in required:
        if found < least_permitted:
            raise PolicyError(
                f"{name}: expected at least {least_permitted} with {sites} sites of which {colluding} may collude, "
                f"found {found}; raise {keys} or the cohort"
            )


@number_refusals("T6")
def require_graph(plan: AttemptPlan) -> None:
    """T6. The whole cohort's shares and masks are connected widely enough."""
    if not plan.neighbours:
        if plan.threshold != plan.quorum or len(plan.members) > ALL_PAIRS:
            raise WireError(
                f"secure plan: without neighbors, a plan needs as many shares as signatures and at most {ALL_PAIRS} "
                f"sites, found {plan.threshold} and {plan.quorum} of {len(plan.members)}"
            )
        return
    require_connected(plan, plan.cohort)


def require_connected(plan: AttemptPlan, sites: Collection[str]) -> None:
    """T6 and A4. With neighbors, each site has enough holders among `sites`, and no c sites separate the others."""
    if not plan.neighbours:
        return
    if plan.threshold < plan.colluding + 1 or graph_connectivity.fewest_partners(plan, sites) < plan.threshold:
        raise PolicyError(
            f"secure.graph-degree: each of the {len(sites)} sites needs at least {plan.threshold} neighbors, and more "
            f"than {plan.colluding}; raise it"
        )
    if not graph_connectivity.is_connected(plan, sites, plan.colluding):
        raise PolicyError(
            f"secure.graph-degree: some {plan.colluding} of the {len(sites)} sites could cut others off, because the "
            "masks do not connect the rest; raise it"
        )


@number_refusals("T8")
def require_entries(plan: AttemptPlan, terms: RoundTerms) -> None:
    """T8. The table of entries is the one in the plan, and each entry has enough sites in the cohort, or none."""
    if bool(plan.entries) != terms.has_table:
        asked = "a table" if terms.has_table else "none"
        raise WireError(f"secure plan: entries: expected {asked} for this method, found {plan.entries or 'none'}")
    if plan.entries or terms.table:
        table = _require_digest(plan, terms.entry_table)
        table.require_cohort(plan.cohort, plan.least, plan.least_in_sum, plan.colluding)


@number_refusals("A5")
def require_entries_of_sum(plan: AttemptPlan, text: str, in_sum: Collection[str]) -> None:
    """A5. Each entry comes from enough sites on the list, or from none."""
    if not plan.entries:
        return
    try:
        table = _require_digest(plan, EntryTable.from_text(text) if text else None)
        table.require_sum(plan.cohort, in_sum, plan.least)
    except QuorumError as error:
        raise PolicyError(f"secure: {error}; no share is opened") from None


def _require_digest(plan: AttemptPlan, table: EntryTable | None) -> EntryTable:
    if table is None or table.digest != plan.entries:
        raise WireError("secure plan: entries: the table is missing, or does not have the digest that the plan names")
    return table


@number_refusals("T7")
def require_later(plan: AttemptPlan, state: SiteSecAggState) -> None:
    """T7. The site has neither masked an update for this or a later attempt nor signed a list in this round."""
    fence = state.fence
    if fence.masked is not None and (plan.round, plan.attempt) <= fence.masked:
        raise PolicyError(
            f"secure: this site masked an update for attempt {fence.masked}, so it accepts only a later one, and not "
            f"({plan.round}, {plan.attempt})"
        )
    if fence.signed is not None and plan.round <= fence.signed:
        raise PolicyError(
            f"secure: this site agreed to a sum in round {fence.signed}, so it refuses round {plan.round}"
        )


@number_refusals("T11")
def require_continued_state(terms: RoundTerms, state: SiteSecAggState) -> None:
    """T11. A site that has continued from private state does not start over in the run."""
    if state.fence.kept and terms.state == "begins":
        raise PolicyError(
            "secure: this site has continued from its private state in this run, so it refuses to start over: that "
            "could isolate its update in a sum; start a new run"
        )


@number_refusals("A3")
def require_listed(plan: AttemptPlan, in_sum: Collection[str], site: str, demands: SiteRequirements) -> None:
    """A3. The list contains this site, only sites in the cohort, and enough of them."""
    least = max(plan.least_in_sum, demands.min_cohort)
    if len(set(in_sum)) < len(in_sum) or not set(in_sum) <= plan.by_name.keys() or site not in in_sum:
        raise PolicyError(
            "secure: the list must contain this site and others of the plan, each once; this list does not"
        )
    if len(in_sum) < least:
        raise PolicyError(f"secure: expected at least {least} sites in a sum, found {len(in_sum)}; no sum is opened")


@number_refusals("O3")
def require_certificate(
    plan: AttemptPlan, in_sum: Collection[str], listed: str, agreed: Mapping[str, str]
) -> Mapping[str, str]:
    """O3. A quorum of the sites on this list signed it. Return their valid signatures.

    If the list is the whole cohort and all pairs share a mask, check nothing and return no signatures.
    """
    if len(in_sum) == len(plan.members) and not plan.neighbours and plan.threshold == plan.quorum:
        return {}
    text = agreed_text(plan, listed)
    signed = {
        site: agreed[site]
        for site in sorted(set(in_sum) & agreed.keys())
        if crypto.is_signed(bytes.fromhex(plan.by_name[site].signing_key), bytes.fromhex(agreed[site]), text)
    }
    if len(signed) < plan.quorum:
        raise PolicyError(
            f"secure: expected {plan.quorum} sites' signatures of this list, found {len(signed)}; no share is opened"
        )
    return signed


@number_refusals("O4")
def require_rows(plan: AttemptPlan, in_sum: Collection[str], site: str, rows: Collection[str]) -> None:
    """O4. There is a row from each site in the sum whose shares this site holds, and no other row."""
    if set(rows) != {dealer for dealer in in_sum if site in plan.holders(dealer)}:
        raise PolicyError(
            "secure: the request must have one row of shares for each site in the sum whose shares this site holds, "
            "and no others"
        )
