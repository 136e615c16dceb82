"""The server's half of one attempt: it adds up masked vectors, and removes the masks from the sum.

| case | what happens |
|---|---|
| an upload for another plan, or with a wrong signature, digest or holder | it is refused; its site is silent |
| the two ends of a pair name different secrets | the attempt is discarded before a list is signed; see `disputes` |
| fewer uploads than max(q, least), or a graph that c sites can cut | the attempt is discarded; no site signs a list |
| any upload is missing, and only the whole cohort's sum can be revealed | the round is lost: its sites mask only once |
| fewer than q signatures of the list, or t shares of a secret | the round is lost: sites have agreed to a sum |
| a share that does not match the digest from its site | it is ignored, and the server waits for others |
| shares that match but reveal a different secret | the round is lost, and their site is `faulty`: it signed both |

An adversary that gets a site excluded from later cohorts has two sums that differ by that site. So a site is excluded
without its partner only if it certainly lies: more sites report it than can lie or be silent.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg import crypto, derivations, graph_connectivity, mask_streams, shamir
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.messages import (
    AgreeRequest,
    AgreeResponse,
    OpenRequest,
    OpenResponse,
    UploadAttachment,
    is_signed_by,
)
from fedveil.federation.secagg.plan import AttemptPlan, agreed_text, list_digest

Secret = tuple[str, str]  # a site in the sum, and its silent partner, or "" for the secret of its own mask


@dataclass
class UnmaskingAttempt:
    """The sum of one attempt.

    Attributes:
        plan: the plan sent to its sites.
        table: text of the plan's table of entries; "" if it has none.
        uploads: attachments of the uploads in the sum.
        in_sum: the sites of these uploads, sorted; empty until the list is closed.
        agreed: signatures of the list, by site.
    """

    plan: AttemptPlan
    table: str = ""
    uploads: dict[str, UploadAttachment] = field(default_factory=dict)
    in_sum: tuple[str, ...] = ()
    agreed: dict[str, str] = field(default_factory=dict)
    _total: Integers | None = None
    _opened: dict[Secret, dict[str, bytes]] = field(default_factory=dict)
    _complaints: set[tuple[str, str]] = field(default_factory=set)  # (holder, site)

    @classmethod
    def from_pending(
        cls, plan: AttemptPlan, table: str, uploads: Mapping[str, UploadAttachment], total: Integers
    ) -> UnmaskingAttempt:
        """Return the attempt with uploads that an earlier server process has checked and added up."""
        return cls(plan, table, dict(uploads), _total=total)

    @property
    def masked_total(self) -> Integers:
        """Return the sum of the masked vectors, which the caller must not change."""
        assert self._total is not None, "the total can be taken only once"
        return self._total

    # Uploads

    def check(self, site: str, vector: Integers, attached: UploadAttachment) -> None:
        """Raise WireError for a late or repeated upload, or an upload that its site did not make for this plan."""
        plan = self.plan
        if site not in plan.by_name or site in self.uploads or self.in_sum:
            raise WireError(f"secure: this upload of {site} is late, repeated, or of a site outside the plan")
        if attached.plan != plan.digest:
            raise WireError(f"secure: the upload of {site} is for a different plan")
        if not is_signed_by(attached, plan.by_name[site]):
            raise WireError(f"secure: the signature of {site} on its upload is invalid")
        partners, holders = plan.partners(site), plan.holders(site)
        if list(attached.pairs) != partners or list(attached.rows) != holders or list(attached.shares) != holders:
            raise WireError(f"secure: the shares of {site} are not for exactly its holders and partners")
        if plan.is_whole == bool(attached.own):
            asked = "must not have a mask" if plan.is_whole else "must have a mask"
            raise WireError(f"secure: {site} {asked} of its own in addition to its pairwise masks")
        count = 1 + len(partners)
        rows = {(len(shares), len(attached.rows[holder]) // 2) for holder, shares in attached.shares.items()}
        if rows - {(count, derivations.row_bytes(count))}:
            raise WireError(
                f"secure: {site} must send {count} shares for each holder, but their number or size differs"
            )
        if attached.vector != hashlib.sha256(np.ascontiguousarray(vector).data).hexdigest():
            raise WireError(f"secure: the vector does not have the digest that {site} signed")

    def add(self, site: str, vector: Integers, attached: UploadAttachment) -> None:
        """Add a masked vector without changing it. Raises WireError like `check`."""
        self.check(site, vector, attached)
        self._total = vector.copy() if self._total is None else np.add(self._total, vector, out=self._total)
        self.uploads[site] = attached

    @property
    def disputes(self) -> list[tuple[str, str]]:
        """Return the pairs of sites with uploads that name different secrets for their shared mask."""
        uploads = self.uploads
        return [
            (site, other)
            for site in sorted(uploads)
            for other in self.plan.partners(site)
            if site < other and other in uploads and uploads[site].pairs[other] != uploads[other].pairs[site]
        ]

    # The list of the sum's sites

    @property
    def digest(self) -> str:
        """Return L, the digest of the list."""
        return list_digest(self.plan.digest, self.in_sum)

    @property
    def silent(self) -> list[str]:
        """Return the cohort's sites that are not in the sum."""
        return [site for site in self.plan.cohort if site not in self.uploads]

    @property
    def needs_agreement(self) -> bool:
        """Return whether sites must sign the list before revealing shares, as with missing sites or neighbors."""
        return bool(self.silent) or bool(self.plan.neighbours)

    def close(self) -> None:
        """Close the list of uploads.

        Raises:
            QuorumError: the sites would not sign such a list, so no site is asked.
        """
        plan, sites = self.plan, sorted(self.uploads)
        if plan.is_whole and self.silent:
            raise QuorumError(
                f"secure.whole-cohort: the uploads of all {len(plan.members)} sites are needed, but none arrived from "
                f"{', '.join(self.silent)}; without it no mask can be removed"
            )
        if len(sites) < plan.least_in_sum:
            raise QuorumError(
                f"secure.min-sites, secure.threshold: a sum needs at least {plan.least_in_sum} sites, but only "
                f"{len(sites)} have uploads"
            )
        if disputes := self.disputes:
            pairs = ", ".join(f"{site} and {other}" for site, other in disputes[:3])
            raise QuorumError(f"secure: the two sites of a pair name different secrets for their mask: {pairs}")
        if plan.neighbours and graph_connectivity.fewest_partners(plan, sites) < plan.threshold:
            raise QuorumError(
                f"secure.graph-degree: each site in the sum needs at least {plan.threshold} holders in it, and some "
                "have fewer; raise it"
            )
        if not graph_connectivity.is_connected(plan, sites, plan.colluding):
            raise QuorumError("secure.graph-degree: the masks do not connect the sites in the sum; raise it")
        self.in_sum = tuple(sites)

    def agree_requests(self) -> dict[str, AgreeRequest]:
        """Return the request to each site on the closed list to sign it."""
        request = AgreeRequest(plan=self.plan, table=self.table, in_sum=self.in_sum)
        return dict.fromkeys(self.in_sum, request)

    def take_agreement(self, site: str, answer: AgreeResponse) -> None:
        """Accept a site's signature of the list. Raises WireError for a different list or an invalid signature."""
        key = bytes.fromhex(self.plan.by_name[site].signing_key)
        is_same = (answer.plan, answer.list) == (self.plan.digest, self.digest)
        if not is_same or not crypto.is_signed(
            key, bytes.fromhex(answer.signature), agreed_text(self.plan, self.digest)
        ):
            raise WireError(f"secure: {site}'s signature of this list is invalid")
        self.agreed[site] = answer.signature

    def open_requests(self) -> dict[str, OpenRequest]:
        """Return the request for shares to each site on the closed list; none if the pairwise masks already cancel.

        Raises:
            QuorumError: too few sites have signed the list, so no site would reveal its shares.
        """
        plan = self.plan
        if plan.is_whole:
            return {}
        if self.needs_agreement and len(self.agreed) < plan.quorum:
            raise QuorumError(
                f"secure.threshold: {plan.quorum} sites must sign the list of the sum, but only {len(self.agreed)} did"
            )
        return {
            holder: OpenRequest(
                plan=plan,
                table=self.table,
                in_sum=self.in_sum,
                agreed=self.agreed if self.needs_agreement else {},
                rows={site: self.uploads[site].rows[holder] for site in self._dealers(holder)},
            )
            for holder in self.in_sum
        }

    def _dealers(self, holder: str) -> list[str]:
        return [site for site in self.in_sum if holder in self.uploads[site].rows]

    # Shares

    def take_opening(self, holder: str, opened: OpenResponse) -> None:
        """Accept a holder's shares.

        Raises:
            WireError: the holder sent shares that were not requested (none are accepted), or shares that do not match
            their digests (the others are accepted).
        """
        plan = self.plan
        if (opened.plan, opened.list) != (plan.digest, self.digest) or not is_signed_by(opened, plan.by_name[holder]):
            raise WireError(f"secure: the shares of {holder} are for a different list, or their signature is invalid")
        dealers = set(self._dealers(holder))
        if opened.own.keys() | set(opened.unread) != dealers or opened.own.keys() & set(opened.unread):
            raise WireError("secure: there must be a share or a complaint for each requested site, and for no other")
        silent = {site: [other for other in plan.partners(site) if other not in self.uploads] for site in opened.own}
        wanted = {site: set(others) for site, others in silent.items() if others}
        if {site: set(of) for site, of in opened.pairs.items()} != wanted:
            raise WireError("secure: the shares are not those of each site's unresponsive partners")
        self._complaints |= {(holder, site) for site in opened.unread}
        wrong = sorted(site for site in opened.own if not self._take_row(holder, site, opened))
        self._complaints |= {(holder, site) for site in wrong}
        if wrong:
            raise WireError(
                f"secure: {holder} returned other shares than {', '.join(wrong)} made for it; they are ignored"
            )

    def _take_row(self, holder: str, site: str, opened: OpenResponse) -> bool:
        """Accept the shares of one site's secrets. Return whether all of them match their digests."""
        partners, expected = self.plan.partners(site), self.uploads[site].shares[holder]
        found = {"": opened.own[site], **opened.pairs.get(site, {})}
        good = 0
        for other, text in found.items():
            share, position = bytes.fromhex(text), 1 + partners.index(other) if other else 0
            if derivations.share_digest(share, self.plan.digest, site, holder, other) == expected[position]:
                self._opened.setdefault((site, other), {})[holder] = share
                good += 1
        return good == len(found)

    def _secrets(self) -> Iterator[Secret]:
        for site in () if self.plan.is_whole else self.in_sum:
            yield site, ""
            for other in self.plan.partners(site):
                if other not in self.uploads:
                    yield site, other

    @property
    def wanting(self) -> list[str]:
        """Return the sites that still have a secret with too few revealed shares."""
        t = self.plan.threshold
        return sorted({site for site, other in self._secrets() if len(self._opened.get((site, other), {})) < t})

    @property
    def faulty(self) -> dict[str, str]:
        """Return the sites that certainly lied, with the reason; if one of two sites must have lied, return both."""
        plan = self.plan
        named: dict[str, str] = {}
        if disputes := self.disputes:
            named |= _liars(disputes, plan.colluding, "it and its partners name different secrets for their masks")
        enough = max(plan.colluding, len(plan.members) - plan.quorum, 1)
        sites, holders = Counter(s for _, s in self._complaints), Counter(h for h, _ in self._complaints)
        named |= {s: "its shares could not be used by many holders" for s, n in sites.items() if n > enough}
        named |= {h: "it could not use the shares of many sites" for h, n in holders.items() if n > enough}
        wanting = set(self.wanting) if self.in_sum else set()
        for site, other in self._secrets():
            if site not in wanting and self._rebuilt(site, other) is None:
                named[site] = "its shares do not reconstruct its secret"
        for holder, site in self._complaints:
            if site in wanting and not {site, holder} & named.keys():
                named |= dict.fromkeys((site, holder), "one of two sites sent shares that the other could not use")
        return named

    def total(self) -> Integers:
        """Return the unmasked sum of the uploaded vectors. Only the first call returns it.

        Raises:
            QuorumError: there are too few shares, or they do not match; nothing was revealed.
        """
        assert self._total is not None, "the total can be taken only once"
        if wanting := self.wanting:
            raise QuorumError(
                f"secure.threshold: {self.plan.threshold} sites must open their shares of "
                f"{', '.join(wanting)}, but fewer did"
            )
        off = list(self.own_masks().values()) + list(self._pair_masks())
        total, self._total = self._total, None
        mask_streams.add_masks(total, off)
        return total

    def own_masks(self) -> dict[str, mask_streams.MaskStream]:
        """Return the streams that remove each site's own mask from the sum, from the revealed shares."""
        p = self.plan.digest
        return {
            site: negate_mask(derivations.own_mask(self._secret(site, other), p, site))
            for site, other in self._secrets()
            if not other
        }

    def _pair_masks(self) -> Iterator[mask_streams.MaskStream]:
        """Yield the streams that remove the masks that sites in the sum share with silent sites."""
        for site, other in self._secrets():
            if other:
                secret = self._secret(site, other)
                yield negate_mask(derivations.pairwise_mask(secret, self.plan.digest, site, other))

    def _secret(self, site: str, other: str) -> bytes:
        if (secret := self._rebuilt(site, other)) is None:
            raise QuorumError(f"secure: the shares of {site}'s secret reconstruct a different secret")
        return secret

    def _rebuilt(self, site: str, other: str) -> bytes | None:
        """Reconstruct a secret from t shares; return None if the site did not use this secret for masking."""
        plan, attached = self.plan, self.uploads[site]
        shares = list(self._opened[site, other].items())[: plan.threshold]
        secret = shamir.combine_shares({plan.place(site, holder): share for holder, share in shares})
        if other:
            fits = derivations.pair_secret_digest(secret, plan.digest, site, other) == attached.pairs[other]
        else:
            fits = derivations.own_secret_digest(secret, plan.digest, site) == attached.own
        return secret if fits else None


def negate_mask(mask: mask_streams.MaskStream) -> mask_streams.MaskStream:
    """Return the stream that removes a mask."""
    return replace(mask, sign=-mask.sign)


def _liars(disputes: Collection[tuple[str, str]], colluding: int, reason: str) -> dict[str, str]:
    """Return the sites to exclude: one in dispute with more than `colluding` others, or else both sites of a pair."""
    counts: Mapping[str, int] = Counter(site for pair in disputes for site in pair)
    named = {site: reason for site, count in counts.items() if count > colluding}
    for pair in disputes:
        if not named.keys() & set(pair):
            named |= dict.fromkeys(pair, reason)
    return named
