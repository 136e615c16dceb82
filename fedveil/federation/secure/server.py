"""The server's half: it passes keys between the sites, adds up masked vectors, and takes the masks off the sum.

| case | what happens |
|---|---|
| a site that is new, or has lost its keys | the next attempt begins with a new membership: every site is set up again |
| a site without a prekey | it is asked for one; without an answer it is left out of the cohort |
| fewer uploads than `least`, or too few shares | the attempt is thrown away; nothing of it can be opened later |
| a share that is wrong | the others are tried without each holder in turn; then the holder that spoils it is named |
| shares that no t holders can make fit | the attempt is thrown away, and the site whose secret it is is named |
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secure import keys, masks, parts, shamir
from fedveil.federation.secure.agreed import negative, own_mask, pair_mask, partners
from fedveil.federation.secure.forms import ALL_PAIRS
from fedveil.federation.secure.kept import How
from fedveil.federation.secure.masks import Integers
from fedveil.federation.secure.membership import Bundle, Member, Membership
from fedveil.federation.secure.statements import Attached, Hello, Opened, Plan, Setup, Unmask


@dataclass(frozen=True)
class Settings:
    """How a run adds up.

    Attributes:
        least: sites that a sum must have.
        threshold: t; 0 = more than two thirds of the holders.
        neighbours: k; 0 = all sites up to 32, else 32.
        bits, most_weight, bound: of the ring.
    """

    least: int = 3
    threshold: int = 0
    neighbours: int = 0
    bits: Literal[32, 64] = 32
    most_weight: int = 1
    bound: float = 64.0

    def holders(self, sites: int) -> int:
        """N of a membership of so many sites."""
        return self._neighbours(sites) or sites

    def _neighbours(self, sites: int) -> int:
        k = self.neighbours or (0 if sites <= ALL_PAIRS else ALL_PAIRS)
        return k if k < sites else 0

    def membership(self, run: str, members: Collection[Member]) -> Membership:
        """The membership of these sites."""
        count = self.holders(len(members))
        return Membership(
            run=run, neighbours=self._neighbours(len(members)), threshold=self.threshold or 2 * count // 3 + 1,
            members=tuple(sorted(members, key=lambda member: member.name)),
        )  # fmt: skip


@dataclass
class Coordinator:
    """The keys of one run, as the server knows them. All of them are public.

    Attributes:
        run: its name with its id.
        roster: signing keys by name, as the federation's registry has them; {} = none is known.
        members: sites that have said their run key.
        bundles: prekeys that are not spent, by site.
    """

    run: str
    settings: Settings
    roster: Mapping[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    bundles: dict[str, Bundle] = field(default_factory=dict)
    membership: Membership | None = None

    def hello(self) -> Hello:
        """What asks a site for its run key."""
        return Hello(run=self.run)

    def admit(self, site: str, member: Member) -> None:
        """Takes a run key. Raises WireError for one of another name or site, or that its owner did not sign."""
        known = self.roster.get(site)
        if any(other.run_key == member.run_key for name, other in self.members.items() if name != site):
            raise WireError(f"secure: expected a run key of {site}'s own, found another site's")
        if member.name != site or not member.is_genuine(self.run) or known not in (None, member.signing_key):
            raise WireError(
                f"secure: expected the run key of {site}, signed with its key of the registry, found another"
            )
        self.members[site] = member

    def forget(self, site: str) -> None:
        """A site's turn has failed: it may have lost its keys, and its prekey is spent."""
        self.members.pop(site, None)
        self.bundles.pop(site, None)

    def settle_on(self, connected: Collection[str]) -> Setup:
        """The membership of the connected sites that have said their keys. A new one has no prekeys yet.

        Raises:
            QuorumError: they are fewer than a sum needs.
        """
        there = [self.members[site] for site in sorted(connected) if site in self.members]
        if len(there) < self.settings.least:
            raise QuorumError(
                f"secure.min-sites: expected at least {self.settings.least} sites with keys, found {len(there)}; start "
                "the missing sites, or see why they refuse"
            )
        if self.settings.threshold > (holders := self.settings.holders(len(there))):
            raise QuorumError(
                f"secure.threshold: expected at least {self.settings.threshold} holders of a secret, found {holders}; "
                "start the missing sites, or lower it"
            )
        found = self.settings.membership(self.run, there)
        if self.membership is None or found.digest != self.membership.digest:
            self.membership, self.bundles = found, {}
        return Setup(membership=self.membership, roster=dict(self.roster))

    def keep(self, site: str, bundle: Bundle) -> None:
        """Takes a prekey. Raises WireError for one that is not the site's, or not for the membership."""
        membership = self._membership
        if bundle.prekey.site != site or not bundle.prekey.is_genuine(membership):
            raise WireError(f"secure: expected a prekey that {site} has signed for this membership, found another")
        if bundle.shares.digest != bundle.prekey.shares or list(bundle.shares.closed) != membership.holders(site):
            raise WireError(f"secure: expected shares of {site}'s prekey for each of its holders, found others")
        self.bundles[site] = bundle

    def attempt(self, round_: int, attempt: int, cohort: Collection[str]) -> Attempt:
        """An attempt with these sites, whose prekeys are spent with it."""
        bundles = {site: self.bundles.pop(site) for site in sorted(cohort)}
        settings = self.settings
        plan = Plan(
            run=self.run, round=round_, attempt=attempt, membership=self._membership.digest, bits=settings.bits,
            most_weight=settings.most_weight, bound=settings.bound, least=settings.least,
            prekeys=tuple(bundle.prekey for bundle in bundles.values()),
        )  # fmt: skip
        return Attempt(plan, self._membership, bundles)

    @property
    def _membership(self) -> Membership:
        assert self.membership is not None, "settle_on comes first"
        return self.membership


@dataclass
class Attempt:
    """The sum of one attempt.

    Attributes:
        plan: what its sites were asked.
        bundles: their prekeys.
        uploads: what came with each upload that is in the sum.
    """

    plan: Plan
    membership: Membership
    bundles: Mapping[str, Bundle]
    uploads: dict[str, Attached] = field(default_factory=dict)
    _total: Integers | None = None
    _opened: dict[tuple[How, str], dict[str, bytes]] = field(default_factory=dict)
    _asked: dict[str, Unmask] = field(default_factory=dict)

    def check(self, site: str, attached: Attached) -> None:
        """Raises WireError unless it is the site's one upload, in time, and its shares are for the site's holders."""
        if site not in self.bundles or site in self.uploads or self._asked:
            raise WireError(f"secure: expected one upload of each site, before the sum is closed; found one of {site}")
        if list(attached.shares.closed) != self.membership.holders(site):
            raise WireError(f"secure: expected shares of {site}'s mask for each of its holders, found others")

    def add(self, site: str, vector: Integers, attached: Attached) -> None:
        """Adds a masked vector, which is only read. Raises WireError as `check`."""
        self.check(site, attached)
        self._total = vector.copy() if self._total is None else np.add(self._total, vector, out=self._total)
        self.uploads[site] = attached

    def questions(self) -> dict[str, Unmask]:
        """What each holder is asked. The list of uploads is closed from here on.

        Raises:
            QuorumError: fewer uploads than it takes; nobody is to be asked.
        """
        plan, asked = self.plan, self._asked
        self._require_least()
        silent = [site for site in plan.cohort if site not in self.uploads]
        heard = {site: attached.shares.closed for site, attached in self.uploads.items()}
        quiet = {site: self.bundles[site].shares.closed for site in silent}
        for holder in self.membership.by_name:
            mine = {site: of[holder] for site, of in sorted(heard.items()) if holder in of}
            theirs = {site: of[holder] for site, of in quiet.items() if holder in of}
            if mine or theirs:
                in_sum = tuple(sorted(self.uploads))
                asked[holder] = Unmask(plan=plan, in_sum=in_sum, heard=mine, silent=theirs)
        return asked

    def answer(self, holder: str, opened: Opened) -> None:
        """Takes a holder's shares. Raises WireError for shares that it was not asked for."""
        asked = self._asked[holder]
        if opened.heard.keys() != asked.heard.keys() or opened.silent.keys() != asked.silent.keys():
            raise WireError("secure: expected the shares that were asked for, found others")
        for site, share in opened.heard.items():
            self._opened.setdefault(("heard", site), {})[holder] = bytes.fromhex(share)
        for site, share in opened.silent.items():
            self._opened.setdefault(("silent", site), {})[holder] = bytes.fromhex(share)

    @property
    def wanting(self) -> list[str]:
        """Sites of which too few shares are here."""
        t = self.membership.threshold
        return [site for how, site in self._secrets() if len(self._opened.get((how, site), {})) < t]

    def _secrets(self) -> Iterator[tuple[How, str]]:
        for site in self.plan.cohort:
            if site in self.uploads:
                yield "heard", site
            elif any(other.site in self.uploads for other in partners(self.plan, self.membership, site)):
                yield "silent", site

    def total(self) -> Integers:
        """The sum of the vectors of the sites that uploaded, without masks. It can be taken once.

        Raises:
            QuorumError: fewer uploads or shares than it takes, or shares that do not fit; nothing was opened.
        """
        self._require_least()
        assert self._total is not None, "a total is taken once"
        if wanting := self.wanting:
            raise QuorumError(
                f"secure.threshold: expected {self.membership.threshold} holders that open their shares of "
                f"{', '.join(wanting)}, found fewer"
            )
        off: list[masks.Mask] = []
        for how, site in self._secrets():
            secret = self._rebuilt(how, site)
            if how == "heard":
                off.append(negative(own_mask(secret, self.plan, site)))
            else:
                off += self._left_by(site, keys.private_of(secret))
        total, self._total = self._total, None
        masks.apply(total, off)
        return total

    def _require_least(self) -> None:
        if len(self.uploads) < self.plan.least:
            raise QuorumError(
                f"secure.min-sites: expected a sum of at least {self.plan.least} sites, found {len(self.uploads)}"
            )
        if (found := parts.smallest(self.membership, self.uploads)) < self.plan.least:
            raise QuorumError(
                f"secure.neighbours: expected masks that join at least {self.plan.least} sites, found {found} of the "
                f"{len(self.uploads)} that have uploaded by themselves; raise it"
            )

    def _left_by(self, site: str, private: bytes) -> Iterator[masks.Mask]:
        """What takes off the masks that a silent site's partners have added for the pair."""
        for other in partners(self.plan, self.membership, site):
            if other.site in self.uploads:
                # The silent site's own sign is the opposite of its partner's: adding its half cancels the other one.
                yield pair_mask(self.plan, site, other.site, private, bytes.fromhex(other.key))

    def _rebuilt(self, how: How, site: str) -> bytes:
        holders = self.membership.holders(site)
        shares = {holders.index(holder) + 1: share for holder, share in self._opened[how, site].items()}
        t = self.membership.threshold
        first = dict(list(shares.items())[:t])
        tries = [first]
        if len(shares) > t:  # one liar among them, whoever it is
            spare = dict(list(shares.items())[t : t + 1])
            tries += [{place: share for place, share in (first | spare).items() if place != out} for out in first]
        for some in tries:
            secret = shamir.combine(some)
            if self._fits(how, site, secret):
                return secret
        raise QuorumError(f"secure: expected shares that open {site}'s secret, found some that do not fit each other")

    def _fits(self, how: How, site: str, secret: bytes) -> bool:
        if how == "heard":
            return hashlib.sha256(secret).hexdigest() == self.uploads[site].mask
        return keys.public_of(keys.private_of(secret)).hex() == self.bundles[site].prekey.key
