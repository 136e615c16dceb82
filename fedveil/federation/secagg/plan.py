"""The plan of an attempt: everything that has to be the same at all of its sites. Its digest p salts every key.

A site that was shown a different plan adds masks that do not cancel, so the sum is noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.derivations import protocol_context
from fedveil.federation.secagg.schema import (
    MOST_NEIGHBORS,
    MOST_SITES,
    Digest,
    Key,
    Name,
    Number,
    RosterDigest,
    SecAggMessage,
    Signature,
)

OptionalDigest = Digest | Literal[""]


class Prekey(SecAggMessage):
    """The public half of the key with which a site masks its update for exactly one plan.

    Attributes:
        signing_key: Ed25519 key that identifies the site to the other sites.
        number: counts the prekeys that the site has made in the run.
        key: X25519 public key.
        signature: signature of the run and the fields above.
    """

    site: Name
    signing_key: Key
    number: Number
    key: Key
    signature: Signature

    def text(self, run: str) -> bytes:
        """Return the bytes that the site signs."""
        return protocol_context("prekey", run, self.site, self.signing_key, self.number, self.key)

    def is_genuine(self, run: str) -> bool:
        """Return whether the prekey is a valid key, signed by the owner of the signing key for this run."""
        key, signature = bytes.fromhex(self.signing_key), bytes.fromhex(self.signature)
        return crypto.is_signed(key, signature, self.text(run)) and crypto.is_point(bytes.fromhex(self.key))


class AttemptPlan(SecAggMessage):
    """The plan of an attempt at a round.

    Attributes:
        roster: digest of the federation's signing keys; "" = none.
        app: SHA-256 of the bundle; "" if no site determines it.
        config: digest of the run config, the method and its fields.
        broadcast: digest of the message to every site; "" if the method's messages differ by site.
        entries: digest of the table that says which sites send each entry; "" = every site sends every entry.
        bits, most_weight, bound: parameters of the ring; the cohort's size m is its maximum number of summands.
        noise: where the noise reaches its full scale, at each "site" or only in the "sum".
        least: minimum number of sites in a sum.
        colluding: c, the number of sites that may collude with a lying server.
        quorum: q, the signatures required on a list of a sum's sites; 0 = only the whole cohort's sum can be revealed.
        threshold: t, the number of shares that reveal a secret; 0 with a quorum of 0.
        neighbours: k, the number of sites with which a site shares masks and secrets; 0 = all pairs.
        members: the cohort's prekeys, sorted by site.
    """

    kind: Literal["plan"] = "plan"
    run: Name
    round: Number
    attempt: Number
    roster: RosterDigest
    app: OptionalDigest
    config: Digest
    broadcast: OptionalDigest
    entries: OptionalDigest
    bits: Literal[32, 64]
    most_weight: int = Field(ge=1, le=100_000_000)
    bound: float = Field(gt=0, le=1e9)
    noise: Literal["site", "sum"]
    least: int = Field(ge=1, le=MOST_SITES)
    colluding: int = Field(ge=0, le=MOST_SITES)
    quorum: int = Field(ge=0, le=MOST_SITES)
    threshold: int = Field(ge=0, le=MOST_SITES)
    neighbours: int = Field(ge=0, le=MOST_NEIGHBORS)
    members: tuple[Prekey, ...] = Field(min_length=1, max_length=MOST_SITES, strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> AttemptPlan:
        if self.cohort != sorted(set(self.cohort)):
            raise ValueError("each site must be listed once, in sorted order")
        if self.neighbours % 2 or self.neighbours >= max(len(self.members), 1):
            raise ValueError("the number of neighbors must be even and below the number of sites")
        if (self.quorum == 0) != (self.threshold == 0) or (self.is_whole and self.neighbours):
            raise ValueError("a plan has a quorum and a threshold, or neither of them and no neighbors")
        return self

    @cached_property
    def cohort(self) -> list[str]:
        """Return the names of the cohort's sites, sorted."""
        return [member.site for member in self.members]

    @cached_property
    def by_name(self) -> Mapping[str, Prekey]:
        """Return the cohort's prekeys by site."""
        return {member.site: member for member in self.members}

    @property
    def is_whole(self) -> bool:
        """Return whether only the whole cohort's sum can be revealed, with pairwise masks only and no shares."""
        return self.quorum == 0

    @property
    def least_in_sum(self) -> int:
        """Return the minimum number of sites in a sum: max(q, least), or the size of the whole cohort."""
        return len(self.members) if self.is_whole else max(self.quorum, self.least)

    @cached_property
    def circle(self) -> list[str]:
        """Return the sites in the order of the neighbor circle."""
        place = {name: hashlib.sha256(protocol_context("circle", self.digest, name)).digest() for name in self.cohort}
        return sorted(self.cohort, key=lambda name: place[name])

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.circle)}

    def partners(self, site: str) -> list[str]:
        """Return the sites with which a site shares a mask, sorted: all others, or its neighbors on the circle."""
        if not self.neighbours:
            return [name for name in self.cohort if name != site]
        at, half = self._place[site], self.neighbours // 2
        offsets = [*range(-half, 0), *range(1, half + 1)]
        return sorted(self.circle[(at + offset) % len(self.circle)] for offset in offsets)

    def holders(self, site: str) -> list[str]:
        """Return the sites that hold shares of a site's secrets, sorted; with all pairs, also the site itself."""
        if self.is_whole:
            return []
        return self.partners(site) if self.neighbours else self.cohort

    def place(self, site: str, holder: str) -> int:
        """Return the place, from 1, of a holder's shares of a site's secrets."""
        return 1 + self.holders(site).index(holder)


def quorum_of(setting: int, sites: int, colluding: int) -> int:
    """Return q for a cohort: `setting`; if 0, more than two thirds and large enough that 2 q > m + c."""
    return setting or max(2 * sites // 3 + 1, (sites + colluding) // 2 + 1)


def config_digest(config: Mapping[str, bool | int | float | str], method: str, fields: str) -> str:
    """Return the digest of a run's config.

    Args:
        config: every key of the run config with its value, including defaults.
        method, fields: the method's name, and its fields as JSON, as in the instruction.

    Raises:
        WireError: the fields are not JSON.
    """
    try:
        parsed = json.loads(fields)
    except (ValueError, RecursionError):
        raise WireError("order: fields: the method's fields are not JSON") from None
    texts = [json.dumps(value, sort_keys=True, separators=(",", ":")) for value in (dict(config), parsed)]
    return hashlib.sha256(protocol_context("config", texts[0], method, texts[1])).hexdigest()


def broadcast_digest(message: str) -> str:
    """Return the digest of a message to all sites in an attempt, from its `wire.header.message_digest`."""
    return hashlib.sha256(protocol_context("alike", message)).hexdigest()


def list_digest(plan: str, in_sum: Collection[str]) -> str:
    """Return L, the digest of a list of the sites in a sum, under the plan with this digest."""
    return hashlib.sha256(protocol_context("list", plan, *sorted(in_sum))).hexdigest()


def agreed_text(plan: AttemptPlan, listed: str) -> bytes:
    """Return the bytes that a site signs to agree to a list."""
    return protocol_context("agreed", plan.run, plan.round, plan.digest, listed)


def too_few_neighbors(sites: int, degree: int, absent: int, shares: int) -> float:
    """Return an upper bound on the probability that some site has fewer than `shares` present neighbors.

    `absent` sites are missing at random; this is a union bound, over the sites, of a hypergeometric tail.
    """
    return sites * _hypergeometric_below(sites - 1, sites - 1 - absent, degree, shares)


def pairs_cut(sites: int, degree: int, absent: int, colluding: int) -> float:
    """Bound from above the probability that two windows of the circle have at most `colluding` present sites."""
    return sites * (sites - 1) / 2 * _hypergeometric_below(sites, sites - absent, degree, colluding + 1)


def _hypergeometric_below(total: int, good: int, drawn: int, below: int) -> float:
    """Return P(X < below), where X is the number of good items among `drawn` of `total`."""
    every = math.comb(total, drawn)
    least = max(0, drawn - (total - good))
    ways = sum(math.comb(good, k) * math.comb(total - good, drawn - k) for k in range(least, below))
    return ways / every
