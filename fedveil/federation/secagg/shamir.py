"""Split 16-byte secrets into shares: any t shares reconstruct the secret, fewer reveal nothing (Shamir, 1979).

The arithmetic is in GF(2^8) with x^8 + x^4 + x^3 + x + 1, byte by byte:

    byte k of the share at place z = secret[k] + sum over d = 1 .. t - 1 of c_d[k] z^d,    z = 1 .. 255

The coefficients c_d come from the operating system. Splitting all secrets of a site at once with a product table
takes milliseconds, whereas arithmetic in GF(2^128) on Python integers takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECRET_BYTES = 16
MOST_PLACES = 255
_POLYNOMIAL = 0x11B

Bytes = NDArray[np.uint8]


def _product(a: int, b: int) -> int:
    result = 0
    while b:
        if b & 1:
            result ^= a
        a <<= 1
        if a & 0x100:
            a ^= _POLYNOMIAL
        b >>= 1
    return result


def _multiply_all() -> Bytes:
    """Return the table of all products, 256 x 256, from the powers of the generator 3."""
    powers = [1]
    while len(powers) < MOST_PLACES:
        powers.append(_product(powers[-1], 3))
    power = np.array(powers * 2, np.uint8)
    logarithm = np.zeros(256, np.int64)
    logarithm[power[:MOST_PLACES]] = np.arange(MOST_PLACES)
    table: Bytes = power[logarithm[:, None] + logarithm[None, :]]
    table[0, :] = table[:, 0] = 0
    return table


PRODUCTS: Bytes = _multiply_all()
INVERSES: Bytes = np.argmax(PRODUCTS == 1, axis=1).astype(np.uint8)  # the entry for 0 is 0


def split_secrets(secrets: Sequence[bytes], threshold: int, places: int) -> list[list[bytes]]:
    """Split secrets into shares for places 1 to `places`, so that any `threshold` shares of a secret reconstruct it.

    Returns, for each place, the shares of all secrets in order.

    Raises:
        ValueError: a secret has the wrong length, the threshold is not from 1 to `places`, or `places` is too large.
    """
    for secret in secrets:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"secret: expected {SECRET_BYTES} bytes, found {len(secret)}")
    if not 1 <= threshold <= places <= MOST_PLACES:
        raise ValueError(f"threshold: expected from 1 to {places} of at most {MOST_PLACES} places, found {threshold}")
    constant = np.frombuffer(b"".join(secrets), np.uint8)
    drawn = os.urandom((threshold - 1) * len(constant))
    return evaluate_shares(constant, np.frombuffer(drawn, np.uint8).reshape(threshold - 1, len(constant)), places)


def evaluate_shares(constant: Bytes, coefficients: NDArray[Any], places: int) -> list[list[bytes]]:
    """Evaluate the polynomials at places 1 to `places`; see `split_secrets`.

    Args:
        constant: the concatenated bytes of the secrets.
        coefficients: (t - 1, bytes), c_1 first.
    """
    at_places = []
    for place in range(1, places + 1):
        times_place, value = PRODUCTS[place], np.zeros_like(constant)
        for coefficient in coefficients[::-1]:  # Horner's rule
            value = times_place[value ^ coefficient]
        share = (value ^ constant).tobytes()
        at_places.append([share[start : start + SECRET_BYTES] for start in range(0, len(share), SECRET_BYTES)])
    return at_places


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct a secret from shares by place; with fewer shares than the threshold the result is noise.

    Raises:
        ValueError: no share, a share of the wrong length, or a place that is not from 1 to 255.
    """
    if not shares or any(len(share) != SECRET_BYTES for share in shares.values()):
        raise ValueError(f"shares: expected at least one, each of {SECRET_BYTES} bytes")
    if not all(1 <= place <= MOST_PLACES for place in shares):
        raise ValueError(f"shares: expected places from 1 to {MOST_PLACES}, found {sorted(shares)}")
    secret = np.zeros(SECRET_BYTES, np.uint8)
    for place, share in shares.items():
        weight = 1  # Lagrange's polynomial of the place, at 0
        for other in shares:
            if other != place:
                weight = int(PRODUCTS[weight, PRODUCTS[other, INVERSES[other ^ place]]])
        secret ^= PRODUCTS[weight][np.frombuffer(share, np.uint8)]
    return secret.tobytes()
