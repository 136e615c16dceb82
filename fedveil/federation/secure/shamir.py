"""Secrets of 16 bytes in shares: any t of them give it back, fewer than t say nothing of it (Shamir, 1979).

The arithmetic, in GF(2^128), is pycryptodome's. A share is 16 bytes and known by its place, from 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET_BYTES = 16


def split(secret: bytes, threshold: int, places: int) -> list[bytes]:
    """The shares of a secret for places 1 to `places`, of which `threshold` open it.

    Raises:
        ValueError: another length, or a threshold that is not from 1 to `places`.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret: expected {SECRET_BYTES} bytes, found {len(secret)}")
    if not 1 <= threshold <= places:
        raise ValueError(f"threshold: expected from 1 to {places}, found {threshold}")
    return [share for _, share in Shamir.split(threshold, places, secret, ssss=False)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """What these shares, by place, open: the secret if they are at least as many as its threshold, else noise."""
    return bytes(Shamir.combine(list(shares.items()), ssss=False))
