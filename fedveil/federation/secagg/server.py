"""The server's part before a round: its requests to the sites, and the keys that it passes between them.

| case | what happens |
|---|---|
| a site that is new, or has lost its keys | the next attempt begins with a new membership: every site is set up again |
| a site without a prekey | it is asked for one; without an answer it is left out of the cohort |
| a site whose shares do not reconstruct its secret | the run continues without it (`expel`) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg.membership import PrekeyBundle, RunMember, RunMembership
from fedveil.federation.secagg.messages import AttemptPlan, MembershipRequest, PrekeyRequest
from fedveil.federation.secagg.schema import ALL_PAIRS
from fedveil.federation.secagg.unmasking import UnmaskingAttempt


@dataclass(frozen=True)
class SecAggConfig:
    """The secure aggregation settings of a run.

    Attributes:
        least: minimum number of sites in a sum.
        threshold: t; 0 means more than two thirds of the holders.
        neighbours: k; 0 means all sites up to 32, else 32.
        bits, most_weight, bound: of the ring.
    """

    least: int = 3
    threshold: int = 0
    neighbours: int = 0
    bits: Literal[32, 64] = 32
    most_weight: int = 1
    bound: float = 64.0

    def holders(self, sites: int) -> int:
        """Return N for a membership of this many sites."""
        return self._neighbours(sites) or sites

    def shares(self, holders: int) -> int:
        """Return t for this many holders."""
        return self.threshold or 2 * holders // 3 + 1

    def _neighbours(self, sites: int) -> int:
        k = self.neighbours or (0 if sites <= ALL_PAIRS else ALL_PAIRS)
        return k if k < sites else 0

    def membership(self, run: str, members: Collection[RunMember]) -> RunMembership:
        """Create the membership of these sites."""
        count = self.holders(len(members))
        return RunMembership(
            run=run, neighbours=self._neighbours(len(members)), threshold=self.shares(count),
            members=tuple(sorted(members, key=lambda member: member.name)),
        )  # fmt: skip


@dataclass
class SecAggCoordinator:
    """The keys of one run, as the server knows them. All of them are public.

    Attributes:
        run: its name with its id.
        roster: signing keys by name, from the federation's registry; {} if none is known.
        members: sites that have sent their run key.
        bundles: unused prekeys, by site.
        expelled: sites that no longer take part, with the reason.
    """

    run: str
    settings: SecAggConfig
    roster: Mapping[str, str] = field(default_factory=dict)
    members: dict[str, RunMember] = field(default_factory=dict)
    bundles: dict[str, PrekeyBundle] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    membership: RunMembership | None = None

    def hello(self) -> MembershipRequest:
        """Return the request for a site's run key."""
        return MembershipRequest(run=self.run)

    def admit(self, site: str, member: RunMember) -> None:
        """Accept a run key. Raises WireError if it is of another name or site, or not signed by its owner."""
        known = self.roster.get(site)
        if any(other.run_key == member.run_key for name, other in self.members.items() if name != site):
            raise WireError(f"secure: expected {site}'s own run key, found another site's")
        if member.name != site or not member.is_genuine(self.run) or known not in (None, member.signing_key):
            raise WireError(f"secure: expected the run key of {site}, signed with its registered key, found another")
        self.members[site] = member

    def forget(self, site: str) -> None:
        """Forget a site's keys after a failed client round: it may have lost them, and its prekey is used up."""
        self.members.pop(site, None)
        self.bundles.pop(site, None)

    def expel(self, site: str) -> None:
        """Exclude a faulty site from the rest of the run, because every sum with it would be discarded."""
        self.forget(site)
        self.expelled[site] = "secure: its shares did not open its secret, so the run continues without it"

    def settle_on(self, connected: Collection[str]) -> PrekeyRequest:
        """Set the membership to the connected sites that have sent their keys. A new membership has no prekeys yet.

        Raises:
            QuorumError: there are fewer sites than a sum needs.
        """
        there = [self.members[site] for site in sorted(connected) if site in self.members]
        if len(there) < self.settings.least:
            raise QuorumError(
                f"secure.min-sites: expected at least {self.settings.least} sites with keys, found {len(there)}; "
                "start the missing sites, or check why they refuse"
            )
        if self.settings.threshold > (holders := self.settings.holders(len(there))):
            raise QuorumError(
                f"secure.threshold: expected at least {self.settings.threshold} holders of a secret, found {holders}; "
                "start the missing sites, or lower it"
            )
        membership = self.settings.membership(self.run, there)
        if self.membership is None or membership.digest != self.membership.digest:
            self.membership, self.bundles = membership, {}
        return PrekeyRequest(membership=self.membership, roster=dict(self.roster))

    def keep(self, site: str, bundle: PrekeyBundle) -> None:
        """Accept a prekey. Raises WireError if it is not the site's, or not for this membership."""
        membership = self._membership
        if bundle.prekey.site != site or not bundle.prekey.is_genuine(membership):
            raise WireError(f"secure: expected a prekey that {site} has signed for this membership, found another")
        if bundle.shares.digest != bundle.prekey.shares or not bundle.shares.are_for(membership.holders(site)):
            raise WireError(f"secure: expected shares of {site}'s prekey for each of its holders, found others")
        self.bundles[site] = bundle

    def attempt(self, round_: int, attempt: int, cohort: Collection[str]) -> UnmaskingAttempt:
        """Begin an attempt with these sites, which uses up their prekeys."""
        bundles = {site: self.bundles.pop(site) for site in sorted(cohort)}
        settings = self.settings
        plan = AttemptPlan(
            run=self.run, round=round_, attempt=attempt, membership=self._membership.digest, bits=settings.bits,
            most_weight=settings.most_weight, bound=settings.bound, least=settings.least,
            prekeys=tuple(bundle.prekey for bundle in bundles.values()),
        )  # fmt: skip
        return UnmaskingAttempt(plan, self._membership, bundles)

    @property
    def _membership(self) -> RunMembership:
        assert self.membership is not None, "call settle_on first"
        return self.membership
