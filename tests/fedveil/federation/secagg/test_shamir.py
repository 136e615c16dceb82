"""Secrets in shares: all subsets, and a field of naive polynomial arithmetic."""

from __future__ import annotations

import os
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.secagg import shamir

_MODULUS = 0b100011011  # x^8 + x^4 + x^3 + x + 1


def times(a: int, b: int) -> int:
    """In GF(2^8): the product of two polynomials over GF(2), then the remainder of a long division."""
    product = 0
    for place in range(8):
        product ^= (a << place) * (b >> place & 1)
    for place in range(14, 7, -1):
        if product >> place & 1:
            product ^= _MODULUS << (place - 8)
    return product


def inverse(a: int) -> int:
    """a^(2^8 - 2)."""
    product = 1
    for _ in range(254):
        product = times(product, a)
    return product


def share_at(place: int, secret: bytes, coefficients: list[bytes]) -> bytes:
    """secret + c_1 z + c_2 z^2 + ..., byte by byte, as the protocol says it."""
    share = []
    for k, byte in enumerate(secret):
        power = 1
        for coefficient in coefficients:
            power = times(power, place)
            byte ^= times(coefficient[k], power)
        share.append(byte)
    return bytes(share)


def naive(shares: dict[int, bytes]) -> bytes:
    """The polynomial through the shares, at 0."""
    total = bytearray(16)
    for place, share in shares.items():
        factor = 1
        for other in shares:
            if other != place:
                factor = times(factor, times(other, inverse(other ^ place)))
        for k, byte in enumerate(share):
            total[k] ^= times(factor, byte)
    return bytes(total)


def split(secret: bytes, threshold: int, places: int) -> dict[int, bytes]:
    """The shares of one secret, by place."""
    return {place: share for place, (share,) in enumerate(shamir.split_secrets([secret], threshold, places), start=1)}


def test_every_product_and_inverse_of_the_field_is_that_of_polynomials():
    for a in range(256):
        assert shamir.PRODUCTS[a].tolist() == [times(a, b) for b in range(256)]
    for a in range(1, 256):
        assert times(a, int(shamir.INVERSES[a])) == 1
        assert shamir.INVERSES[a] == inverse(a)


@pytest.mark.parametrize("places", range(1, 7))
def test_every_subset_of_at_least_the_threshold_opens_and_no_smaller_one(places):
    for threshold in range(1, places + 1):
        secret = os.urandom(16)
        shares = split(secret, threshold, places)
        assert len(shares) == places
        for size in range(1, places + 1):
            for some in combinations(shares, size):
                recovered_secret = shamir.combine_shares({place: shares[place] for place in some})
                assert (recovered_secret == secret) == (size >= threshold)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_threshold_of_any_number_of_places_opens(data):
    places = data.draw(st.integers(1, 255))
    threshold = data.draw(st.integers(1, places))
    secrets = data.draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=3))
    chosen = data.draw(st.permutations(range(1, places + 1)))[: data.draw(st.integers(threshold, places))]
    rows = shamir.split_secrets(secrets, threshold, places)
    assert [len(row) for row in rows] == [len(secrets)] * places
    for i, secret in enumerate(secrets):
        assert shamir.combine_shares({place: rows[place - 1][i] for place in chosen}) == secret


def test_it_is_the_polynomial_through_the_shares():
    secret = os.urandom(16)
    shares = split(secret, 3, 5)
    for some in combinations(shares, 3):
        assert naive({place: shares[place] for place in some}) == secret


@pytest.mark.parametrize(("threshold", "places"), [(1, 3), (2, 2), (3, 7), (9, 255)])
def test_shares_are_values_of_the_polynomial_with_the_drawn_coefficients(threshold, places):
    """Each secret has coefficients of its own."""
    secrets = [os.urandom(16) for _ in range(3)]
    coefficients = [[os.urandom(16) for _ in secrets] for _ in range(threshold - 1)]  # c_1 of all secrets, c_2, ...
    drawn = np.frombuffer(b"".join(b"".join(of) for of in coefficients), np.uint8).reshape(threshold - 1, 48)
    rows = shamir.evaluate_shares(np.frombuffer(b"".join(secrets), np.uint8), drawn, places)
    assert len(rows) == places
    for place in {1, 2, places}:
        if place <= places:
            wanted = [share_at(place, s, [of[i] for of in coefficients]) for i, s in enumerate(secrets)]
            assert rows[place - 1] == wanted


def test_coefficients_are_as_many_bytes_of_the_operating_system_as_there_are_unknowns(monkeypatch):
    drawn = []
    monkeypatch.setattr(os, "urandom", lambda count: drawn.append(bytes(range(count))) or drawn[-1])
    rows = shamir.split_secrets([bytes(16), bytes([7]) * 16], 3, 4)
    assert [len(text) for text in drawn] == [2 * 2 * 16]
    of = drawn[0]
    for i, secret in enumerate((bytes(16), bytes([7]) * 16)):
        coefficients = [of[32 * d + 16 * i : 32 * d + 16 * i + 16] for d in range(2)]
        assert [row[i] for row in rows] == [share_at(place, secret, coefficients) for place in range(1, 5)]


@pytest.mark.long
def test_fewer_shares_than_the_threshold_leave_every_secret_possible():
    """With one share of two there is one polynomial for each secret: one other second share for each first byte."""
    shares = split(bytes(16), 2, 3)
    secrets = [naive({1: shares[1], 2: bytes([first]) + shares[2][1:]})[0] for first in range(256)]
    assert sorted(secrets) == list(range(256))


def test_the_same_secret_has_other_shares_each_time():
    assert len({tuple(split(bytes(16), 2, 3).values()) for _ in range(8)}) == 8


def test_a_hundred_secrets_are_split_and_opened_in_well_under_a_second():
    secrets = [os.urandom(16) for _ in range(100)]
    started = time.process_time()
    rows = shamir.split_secrets(secrets, 67, 100)
    split_seconds = time.process_time() - started
    started = time.process_time()
    opened = shamir.combine_shares({place: rows[place - 1][99] for place in range(20, 87)})
    assert (split_seconds < 0.7, time.process_time() - started < 0.7) == (True, True)
    assert opened == secrets[99]


@pytest.mark.parametrize("secret", [b"", bytes(15), bytes(17), bytes(32)])
def test_a_secret_of_another_length(secret):
    with pytest.raises(ValueError, match="secret: expected 16 bytes"):
        shamir.split_secrets([bytes(16), secret], 2, 3)


@pytest.mark.parametrize(("threshold", "places"), [(0, 3), (4, 3), (-1, 3), (1, 0), (2, 256)])
def test_a_threshold_out_of_range(threshold, places):
    with pytest.raises(ValueError, match="threshold"):
        shamir.split_secrets([bytes(16)], threshold, places)


@pytest.mark.parametrize("shares", [{}, {1: bytes(15)}, {1: bytes(16), 2: bytes(17)}])
def test_shares_of_another_length_or_none(shares):
    with pytest.raises(ValueError, match="at least one, each of 16 bytes"):
        shamir.combine_shares(shares)


@pytest.mark.parametrize("place", [0, -1, 256])
def test_a_share_at_no_place(place):
    with pytest.raises(ValueError, match="places from 1 to 255"):
        shamir.combine_shares({1: bytes(16), place: bytes(16)})
