"""The server's half of one attempt: it adds up masked vectors, and removes the masks from the sum.

| case | what happens |
|---|---|
| fewer uploads than `least`, or too few shares | the attempt is thrown away; nothing of it can be opened later |
| a share that does not match the digest that its site gave | it is left out, and others are waited for; which of the
  two, site or holder, is wrong, is not known |
| a site whose shares open another secret, or so many of whose holders open no such share that not all of them can be
  wrong | the attempt is thrown away, and the site is `faulty`: a run can go on without it |

An adversary that gets a site left out of the retry has two sums that differ by it. So more holders must
report a site as faulty than the c <= min(t - 1, K - 2) sites that may collude with the server
(adversary_model.py). At least one of them is then honest, and the report is true. They must also be more
than the N - t holders that a sum can do without, and more than one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedveil.errors import QuorumError, WireError
from fedveil.federation.secagg import crypto, graph_connectivity, mask_streams, shamir
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.membership import PrekeyBundle, RunMembership
from fedveil.federation.secagg.messages import AttemptPlan, UnmaskRequest, UnmaskResponse, UploadAttachment
from fedveil.federation.secagg.pairwise_keys import (
    mask_partners,
    mask_purpose,
    negate_mask,
    pairwise_mask,
    seed_purpose,
    self_mask,
)
from fedveil.federation.secagg.state import How


@dataclass
class UnmaskingAttempt:
    """The sum of one attempt.

    Attributes:
        plan: the plan sent to its sites.
        bundles: their prekeys.
        uploads: attachments of the uploads that are in the sum.
    """

    plan: AttemptPlan
    membership: RunMembership
    bundles: Mapping[str, PrekeyBundle]
    uploads: dict[str, UploadAttachment] = field(default_factory=dict)
    _total: Integers | None = None
    _opened: dict[tuple[How, str], dict[str, bytes]] = field(default_factory=dict)
    _asked: dict[str, UnmaskRequest] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)

    def check(self, site: str, attached: UploadAttachment) -> None:
        """Raise WireError for a late or repeated upload, or one whose shares are not for the site's holders."""
        if site not in self.bundles or site in self.uploads or self._asked:
            raise WireError(f"secure: expected one upload per site before the sum is closed; found one from {site}")
        if not attached.shares.are_for(self.membership.holders(site)):
            raise WireError(f"secure: expected shares of {site}'s mask for each of its holders, found others")

    def add(self, site: str, vector: Integers, attached: UploadAttachment) -> None:
        """Add a masked vector, which is only read. Raises WireError as `check`."""
        self.check(site, attached)
        self._total = vector.copy() if self._total is None else np.add(self._total, vector, out=self._total)
        self.uploads[site] = attached

    def questions(self) -> dict[str, UnmaskRequest]:
        """Return the request to each holder, and close the list of uploads.

        Raises:
            QuorumError: there are too few uploads; the server must not ask any holder.
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
                asked[holder] = UnmaskRequest(plan=plan, in_sum=in_sum, heard=mine, silent=theirs)
        return asked

    def answer(self, holder: str, opened: UnmaskResponse) -> None:
        """Accept a holder's shares.

        Raises:
            WireError: the holder sent shares that were not requested (none is accepted), or shares that do not match
            their digests (the others are accepted).
        """
        asked = self._asked[holder]
        if not (opened.heard.keys() <= asked.heard.keys() and opened.silent.keys() <= asked.silent.keys()):
            raise WireError("secure: expected the requested shares, found others")
        self._answered.add(holder)
        answers: tuple[tuple[How, dict[str, str]], ...] = (("heard", opened.heard), ("silent", opened.silent))
        wrong = []
        for how, shares in answers:
            for site, share in shares.items():
                if self._is_own(how, site, holder, bytes.fromhex(share)):
                    self._opened.setdefault((how, site), {})[holder] = bytes.fromhex(share)
                else:
                    wrong.append(site)
        if wrong:
            raise WireError(
                f"secure: expected its shares of {', '.join(wrong)} as those sites made them, found others; they are "
                "ignored"
            )

    def _is_own(self, how: How, site: str, holder: str, share: bytes) -> bool:
        if how == "heard":
            shares, purpose = self.uploads[site].shares, mask_purpose(self.plan, site, holder)
        else:
            bundle = self.bundles[site]
            shares, purpose = bundle.shares, seed_purpose(self.membership, site, bundle.prekey.number, holder)
        return crypto.share_digest(share, purpose) == shares.digests[holder]

    @property
    def wanting(self) -> list[str]:
        """Return the sites with too few shares so far."""
        t = self.membership.threshold
        return [site for how, site in self._secrets() if len(self._opened.get((how, site), {})) < t]

    @property
    def faulty(self) -> list[str]:
        """Return the sites whose shares do not reconstruct their secret."""
        count, t = self.membership.count, self.membership.threshold
        needed, wanting, faulty_sites = max(2, count - t + 1, min(t, self.plan.least - 1)), set(self.wanting), []
        for how, site in self._secrets():
            opened = self._opened.get((how, site), {})
            lacking = self._answered.intersection(self.membership.holders(site)) - opened.keys()
            if len(lacking) >= needed or (site not in wanting and self._rebuilt(how, site) is None):
                faulty_sites.append(site)
        return faulty_sites

    def _secrets(self) -> Iterator[tuple[How, str]]:
        for site in self.plan.cohort:
            if site in self.uploads:
                yield "heard", site
            elif any(other.site in self.uploads for other in mask_partners(self.plan, self.membership, site)):
                yield "silent", site

    def total(self) -> Integers:
        """Return the unmasked sum of the uploaded vectors. It can be taken once.

        Raises:
            QuorumError: there are too few uploads or shares, or the shares do not fit; nothing was revealed.
        """
        self._require_least()
        assert self._total is not None, "the total can be taken only once"
        if wanting := self.wanting:
            raise QuorumError(
                f"secure.threshold: expected {self.membership.threshold} holders to open their shares of "
                f"{', '.join(wanting)}, found fewer"
            )
        off = list(self.own_masks().values())
        for how, site in self._secrets():
            if how == "silent":
                off += self._left_by(site, crypto.private_key_from(self._secret(how, site)))
        total, self._total = self._total, None
        mask_streams.add_masks(total, off)
        return total

    def _require_least(self) -> None:
        if len(self.uploads) < self.plan.least:
            raise QuorumError(
                f"secure.min-sites: expected a sum of at least {self.plan.least} sites, found {len(self.uploads)}"
            )
        missing, most = len(self.plan.cohort) - len(self.uploads), graph_connectivity.max_dropouts(self.membership)
        if missing > most:
            raise QuorumError(
                f"secure.threshold: expected at most {most} silent sites of {len(self.plan.cohort)}, found {missing}: "
                "no holder opens such a sum"
            )
        if (size := graph_connectivity.smallest_component(self.membership, self.uploads)) < self.plan.least:
            raise QuorumError(
                f"secure.graph-degree: expected masks that join at least {self.plan.least} sites, found a separate "
                f"group of {size} among the {len(self.uploads)} that uploaded; raise it"
            )

    def own_masks(self) -> dict[str, mask_streams.MaskStream]:
        """Return the streams that remove the own mask of each site in the sum, from the revealed shares."""
        heard = [site for how, site in self._secrets() if how == "heard"]
        return {site: negate_mask(self_mask(self._secret("heard", site), self.plan, site)) for site in heard}

    def _left_by(self, site: str, private: bytes) -> Iterator[mask_streams.MaskStream]:
        """Yield the streams that remove the pairwise masks added by a dropped-out site's partners."""
        for other in mask_partners(self.plan, self.membership, site):
            if other.site in self.uploads:
                # The silent site's own sign is the opposite of its partner's: adding its half cancels the other one.
                yield pairwise_mask(self.plan, site, other.site, private, bytes.fromhex(other.key))

    def _secret(self, how: How, site: str) -> bytes:
        if (secret := self._rebuilt(how, site)) is None:
            raise QuorumError(f"secure: expected shares that open {site}'s secret, found shares of another secret")
        return secret

    def _rebuilt(self, how: How, site: str) -> bytes | None:
        """Reconstruct a secret from t shares; None if it is not the one that the site used for masking."""
        holders = self.membership.holders(site)
        shares = list(self._opened[how, site].items())[: self.membership.threshold]
        secret = shamir.combine_shares({holders.index(holder) + 1: share for holder, share in shares})
        if how == "heard":
            fits = hashlib.sha256(secret).hexdigest() == self.uploads[site].mask
        else:
            fits = crypto.public_key_of(crypto.private_key_from(secret)).hex() == self.bundles[site].prekey.key
        return secret if fits else None
