"""Secrets in shares: all subsets, and a naive field."""

from __future__ import annotations

import os
from itertools import combinations

import pytest

from fedveil.federation.secagg import shamir

_MODULUS = (1 << 128) | 0b10000111  # x^128 + x^7 + x^2 + x + 1


def times(a: int, b: int) -> int:
    """In GF(2^128), bit by bit."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        b >>= 1
        a <<= 1
        if a >> 128:
            a ^= _MODULUS
    return product


def inverse(a: int) -> int:
    """a^(2^128 - 2)."""
    product, power, left = 1, a, (1 << 128) - 2
    while left:
        if left & 1:
            product = times(product, power)
        power, left = times(power, power), left >> 1
    return product


def naive(shares: dict[int, bytes]) -> bytes:
    """The polynomial through the shares, at 0."""
    total = 0
    for place, share in shares.items():
        factor = 1
        for other in shares:
            if other != place:
                factor = times(factor, times(other, inverse(other ^ place)))
        total ^= times(factor, int.from_bytes(share, "big"))
    return total.to_bytes(16, "big")


@pytest.mark.parametrize("places", range(1, 7))
def test_every_subset_of_at_least_the_threshold_opens_and_no_smaller_one(places):
    for threshold in range(1, places + 1):
        secret = os.urandom(16)
        shares = dict(enumerate(shamir.split_secret(secret, threshold, places), start=1))
        assert len(shares) == places
        for size in range(1, places + 1):
            for some in combinations(shares, size):
                recovered_secret = shamir.combine_shares({place: shares[place] for place in some})
                assert (recovered_secret == secret) == (size >= threshold)


def test_it_is_the_polynomial_through_the_shares():
    secret = os.urandom(16)
    shares = dict(enumerate(shamir.split_secret(secret, 3, 5), start=1))
    for some in combinations(shares, 3):
        assert naive({place: shares[place] for place in some}) == secret


def test_the_same_secret_has_other_shares_each_time():
    assert len({tuple(shamir.split_secret(bytes(16), 2, 3)) for _ in range(8)}) == 8


@pytest.mark.parametrize("secret", [b"", bytes(15), bytes(17), bytes(32)])
def test_a_secret_of_another_length(secret):
    with pytest.raises(ValueError, match="secret: expected 16 bytes"):
        shamir.split_secret(secret, 2, 3)


@pytest.mark.parametrize(("threshold", "places"), [(0, 3), (4, 3), (-1, 3), (1, 0)])
def test_a_threshold_out_of_range(threshold, places):
    with pytest.raises(ValueError, match="threshold"):
        shamir.split_secret(bytes(16), threshold, places)
