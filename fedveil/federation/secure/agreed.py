"""What two ends agree on: the masks of a pair, a site's own, and the keys under which shares are closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedveil.federation.secure import keys, masks, shamir
from fedveil.federation.secure.forms import ClosedShare, ShareDigest
from fedveil.federation.secure.kept import Kept
from fedveil.federation.secure.membership import Membership, Prekey, Shares
from fedveil.federation.secure.statements import Plan


def closed_shares(
    kept: Kept, membership: Membership, site: str, secret: bytes, purpose: Callable[[str], bytes]
) -> Shares:
    """The shares of a secret of `site`, each closed to its holder under `purpose` of the holder."""
    holders = membership.holders(site)
    shares = shamir.split(secret, membership.threshold, len(holders))
    closed: dict[str, ClosedShare] = {}
    digests: dict[str, ShareDigest] = {}
    for holder, share in zip(holders, shares, strict=True):
        text = purpose(holder)
        closed[holder] = keys.closed(key_with(kept, membership, holder, text), share, text).hex()
        digests[holder] = keys.share_digest(share, text)
    return Shares(closed=closed, digests=digests)


def key_with(kept: Kept, membership: Membership, other: str, purpose: bytes) -> bytes:
    """Of both ends' run keys. Not of the prekey: who rebuilds that one would open the shares of the site's own mask."""
    return keys.agreed(bytes.fromhex(kept.run_key), bytes.fromhex(membership.by_name[other].run_key), purpose)


def partners(plan: Plan, membership: Membership, site: str) -> list[Prekey]:
    """The cohort's sites with which a site has a mask in common."""
    near = set(membership.holders(site)) - {site}
    return [prekey for prekey in plan.prekeys if prekey.site in near]


def pair_mask(plan: Plan, site: str, other: str, private: bytes, public: bytes) -> masks.Mask:
    """The mask that `site` adds for the pair; the other one subtracts it."""
    first, second = sorted((site, other))
    key = keys.agreed(private, public, keys.about("pair mask", first, second), bytes.fromhex(plan.digest))
    return masks.Mask(key, 1 if site == first else -1)


def own_mask(secret: bytes, plan: Plan, site: str) -> masks.Mask:
    """The mask that `site` adds for itself alone."""
    return masks.Mask(keys.derived(secret, keys.about("own mask", site), bytes.fromhex(plan.digest)), 1)


def negative(mask: masks.Mask) -> masks.Mask:
    """What takes a mask off."""
    return replace(mask, sign=-mask.sign)


def seed_purpose(membership: Membership, site: str, number: int, holder: str) -> bytes:
    """Of a share of a prekey's seed."""
    return keys.about("prekey share", membership.digest, site, number, holder)


def mask_purpose(plan: Plan, site: str, holder: str) -> bytes:
    """Of a share of the secret of a site's own mask."""
    return keys.about("mask share", plan.digest, site, holder)
