"""Keys, masks and digests derived under a plan. X(i, j) is the X25519 secret of two prekeys, p the plan's digest.

u_ij      = HKDF(X(i, j), salt = p, info = about("pair", first, second), 16)        first < second by name
pair mask = PRG(HKDF(u_ij, salt = p, info = about("pair mask", first, second), 32)), first adds, second subtracts
own mask  = PRG(HKDF(b_i, salt = p, info = about("own mask", i), 32)), added
K_ih      = HKDF(X(i, h), salt = p, info = about("row", i, h), 32)                  from i to h; i = h is allowed
row_ih    = nonce | AES-256-GCM(K_ih, shares of b_i | of u_ij for each partner j by name, about("row", p, i, h))
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.mask_streams import MaskStream
from fedveil.federation.secagg.shamir import SECRET_BYTES

_NONCE_AND_TAG_BYTES = 12 + 16


def protocol_context(purpose: str, *parts: str | int) -> bytes:
    """Encode a purpose and its parts as bytes, so that different parts never give the same bytes."""
    # This is the JSON of a list, without the cost of an encoder: a site derives thousands of keys per round.
    encoded = [
        encode_basestring_ascii(part) if isinstance(part, str) else str(part)
        for part in ("fedveil secure aggregation 2", purpose, *parts)
    ]
    return f"[{','.join(encoded)}]".encode()


def pair_secret(shared: bytes, plan: str, site: str, other: str) -> bytes:
    """Derive u_ij from X(i, j)."""
    return crypto.derive_key(
        shared, protocol_context("pair", *sorted((site, other))), bytes.fromhex(plan), SECRET_BYTES
    )


def pairwise_mask(secret: bytes, plan: str, site: str, other: str) -> MaskStream:
    """Return the mask that `site` adds for the pair, from u_ij; the other site adds its negative."""
    first, second = sorted((site, other))
    key = crypto.derive_key(secret, protocol_context("pair mask", first, second), bytes.fromhex(plan))
    return MaskStream(key, 1 if site == first else -1)


def own_mask(secret: bytes, plan: str, site: str) -> MaskStream:
    """Return the mask that only `site` knows and adds, from b_i."""
    return MaskStream(crypto.derive_key(secret, protocol_context("own mask", site), bytes.fromhex(plan)), 1)


def row_key(shared: bytes, plan: str, site: str, holder: str) -> bytes:
    """Derive the key for the row of shares from `site` to `holder`, from X(i, h)."""
    return crypto.derive_key(shared, protocol_context("row", site, holder), bytes.fromhex(plan))


def row_bytes(count: int) -> int:
    """Return the size of an encrypted row of `count` shares."""
    return _NONCE_AND_TAG_BYTES + count * SECRET_BYTES


def encrypt_row(key: bytes, shares: Sequence[bytes], plan: str, site: str, holder: str) -> str:
    """Encrypt a holder's shares, and return the row in hex."""
    return crypto.encrypt_share(key, b"".join(shares), protocol_context("row", plan, site, holder)).hex()


def decrypt_row(key: bytes, row: str, count: int, plan: str, site: str, holder: str) -> list[bytes]:
    """Decrypt a row of `count` shares. Raises WireError for a wrong key, plan, dealer, holder or length."""
    data = bytes.fromhex(row)
    if len(data) != row_bytes(count):
        raise WireError(f"row: expected {count} shares, found {len(data)} bytes")
    text = crypto.decrypt_share(key, data, protocol_context("row", plan, site, holder))
    return [text[start : start + SECRET_BYTES] for start in range(0, len(text), SECRET_BYTES)]


def own_secret_digest(secret: bytes, plan: str, site: str) -> str:
    """Return the digest used to check a reconstructed b_i."""
    return hashlib.sha256(protocol_context("own secret", plan, site) + secret).hexdigest()


def pair_secret_digest(secret: bytes, plan: str, site: str, other: str) -> str:
    """Return the digest used to check a reconstructed u_ij; it is the same from both ends."""
    return hashlib.sha256(protocol_context("pair secret", plan, *sorted((site, other))) + secret).hexdigest()


def share_digest(share: bytes, plan: str, site: str, holder: str, partner: str = "") -> str:
    """Return 32 hex digits that identify a holder's share of `site`'s own secret, or of its secret with a partner.

    Shares are uniform, so the digest reveals nothing. No site can be named "".
    """
    if partner:
        context = protocol_context("pair share", plan, site, holder, partner)
    else:
        context = protocol_context("own share", plan, site, holder)
    return hashlib.sha256(context + share).hexdigest()[:32]
