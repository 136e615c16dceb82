"""Values that two ends agree on: pairwise masks, a site's own mask, and the keys that encrypt shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedveil.federation.secagg import crypto, mask_streams, shamir
from fedveil.federation.secagg.membership import EncryptedShares, RoundPrekey, RunMembership
from fedveil.federation.secagg.messages import AttemptPlan
from fedveil.federation.secagg.schema import ClosedShare, ShareDigest
from fedveil.federation.secagg.state import SiteSecAggState


def encrypt_shares(
    kept: SiteSecAggState, membership: RunMembership, site: str, secret: bytes, purpose: Callable[[str], bytes]
) -> EncryptedShares:
    """Return the shares of a secret of `site`, each encrypted to its holder under `purpose(holder)`."""
    holders = membership.holders(site)
    shares = shamir.split_secret(secret, membership.threshold, len(holders))
    closed: dict[str, ClosedShare] = {}
    digests: dict[str, ShareDigest] = {}
    for holder, share in zip(holders, shares, strict=True):
        text = purpose(holder)
        closed[holder] = crypto.encrypt_share(agree_key(kept, membership, holder, text), share, text).hex()
        digests[holder] = crypto.share_digest(share, text)
    return EncryptedShares(closed=closed, digests=digests)


def agree_key(kept: SiteSecAggState, membership: RunMembership, other: str, purpose: bytes) -> bytes:
    """Derive a key from both run keys, not prekeys: holders who reconstruct a prekey could read own-mask shares."""
    return crypto.agree_secret(bytes.fromhex(kept.run_key), bytes.fromhex(membership.by_name[other].run_key), purpose)


def mask_partners(plan: AttemptPlan, membership: RunMembership, site: str) -> list[RoundPrekey]:
    """Return the prekeys of the cohort's sites with which a site shares a mask."""
    near = set(membership.holders(site)) - {site}
    return [prekey for prekey in plan.prekeys if prekey.site in near]


def pairwise_mask(plan: AttemptPlan, site: str, other: str, private: bytes, public: bytes) -> mask_streams.MaskStream:
    """Return the mask that `site` adds for the pair; the other site subtracts it."""
    first, second = sorted((site, other))
    key = crypto.agree_secret(
        private, public, crypto.context_bytes("pair mask", first, second), bytes.fromhex(plan.digest)
    )
    return mask_streams.MaskStream(key, 1 if site == first else -1)


def self_mask(secret: bytes, plan: AttemptPlan, site: str) -> mask_streams.MaskStream:
    """Return the mask that only `site` knows and adds."""
    return mask_streams.MaskStream(
        crypto.derive_key(secret, crypto.context_bytes("own mask", site), bytes.fromhex(plan.digest)), 1
    )


def negate_mask(mask: mask_streams.MaskStream) -> mask_streams.MaskStream:
    """Return the stream that removes a mask."""
    return replace(mask, sign=-mask.sign)


def seed_purpose(membership: RunMembership, site: str, number: int, holder: str) -> bytes:
    """Return the encryption context of a share of a prekey's seed."""
    return crypto.context_bytes("prekey share", membership.digest, site, number, holder)


def mask_purpose(plan: AttemptPlan, site: str, holder: str) -> bytes:
    """Return the encryption context of a share of the secret of a site's own mask."""
    return crypto.context_bytes("mask share", plan.digest, site, holder)
