"""Split secrets of 16 bytes into shares: any t reconstruct the secret, fewer reveal nothing (Shamir, 1979).

The arithmetic, in GF(2^128), is pycryptodome's. A share is 16 bytes and known by its place, from 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET_BYTES = 16


def split_secret(secret: bytes, threshold: int, places: int) -> list[bytes]:
    """Split a secret into shares for places 1 to `places`, so that any `threshold` shares reconstruct it.

    Raises:
        ValueError: another length, or a threshold that is not from 1 to `places`.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: expected {SECRET_BYTES} bytes, found {len(secret)}")
    if not 1 <= threshold <= places:
        raise ValueError(f"threshold: expected from 1 to {places}, found {threshold}")
    return [share for _, share in Shamir.split(threshold, places, secret, ssss=False)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct a secret from shares by place; with fewer shares than the threshold the result is noise."""
    return bytes(Shamir.combine(list(shares.items()), ssss=False))
