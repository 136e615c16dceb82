"""Keys bound to what they are for; against pycryptodome where it has the same."""

from __future__ import annotations

import json
import os

import pytest
from Crypto.Cipher import AES
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.derivations import protocol_context

PARTS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 99)), max_size=4)


@given(one=PARTS, two=PARTS)
def test_other_parts_are_another_text(one, two):
    same = [(type(p), p) for p in one] == [(type(p), p) for p in two]
    assert (crypto.context_bytes("x", *one) == crypto.context_bytes("x", *two)) == same
    assert crypto.context_bytes("x", *one) != crypto.context_bytes("y", *one)


@given(parts=st.lists(st.one_of(st.text(), st.integers()), max_size=4))
def test_the_text_of_the_protocol_is_json_of_a_list(parts):
    wanted = json.dumps(["fedveil secure aggregation 2", "x", *parts], separators=(",", ":"), ensure_ascii=True)
    assert protocol_context("x", *parts) == wanted.encode("ascii")
    assert protocol_context("x", *parts) != crypto.context_bytes("x", *parts)  # a roster's, which policies name


def test_parts_cannot_run_into_each_other():
    assert crypto.context_bytes("mask share", "d", "a", "bc") != crypto.context_bytes("mask share", "d", "ab", "c")
    assert crypto.context_bytes("x", 1) != crypto.context_bytes("x", "1")
    assert crypto.context_bytes("x", 'a","b') != crypto.context_bytes("x", "a", "b")


def test_both_ends_agree_on_a_key_for_one_purpose():
    alice, bob = os.urandom(32), os.urandom(32)
    one = crypto.agree_secret(alice, crypto.public_key_of(bob), b"for", b"salt")
    assert one == crypto.agree_secret(bob, crypto.public_key_of(alice), b"for", b"salt")
    others = [
        crypto.agree_secret(alice, crypto.public_key_of(bob), b"other", b"salt"),
        crypto.agree_secret(alice, crypto.public_key_of(bob), b"for", b"tlas"),
        crypto.agree_secret(alice, crypto.public_key_of(bob), b"for"),
        crypto.agree_secret(alice, crypto.public_key_of(alice), b"for", b"salt"),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("salt", [b"", b"salt"])
def test_derivation_is_that_of_another_library(salt):
    secret = os.urandom(32)
    for length in (16, 32):
        wanted = HKDF(secret, length, salt, SHA256, context=b"purpose")
        assert crypto.derive_key(secret, b"purpose", salt, length) == wanted
    assert len(crypto.derive_key(secret, b"purpose", salt)) == 32


def test_a_key_of_both_ends_is_derived_from_x25519():
    alice, bob = os.urandom(32), os.urandom(32)
    shared = crypto.exchange_keys(alice, crypto.public_key_of(bob))
    assert shared == crypto.exchange_keys(bob, crypto.public_key_of(alice))
    assert crypto.agree_secret(alice, crypto.public_key_of(bob), b"for", b"salt") == crypto.derive_key(
        shared, b"for", b"salt"
    )


def test_what_is_closed_is_aes_gcm_of_another_library():
    key, text = os.urandom(32), os.urandom(16)
    data = crypto.encrypt_share(key, text, b"for")
    cipher = AES.new(key, AES.MODE_GCM, nonce=data[:12])
    cipher.update(b"for")
    assert cipher.decrypt_and_verify(data[12:-16], data[-16:]) == text
    assert len(data) == 44
    assert crypto.decrypt_share(key, data, b"for") == text
    assert crypto.encrypt_share(key, text, b"for") != data


def test_nothing_is_opened_of_another_key_purpose_or_byte():
    key, text = os.urandom(32), os.urandom(16)
    data = crypto.encrypt_share(key, text, b"for")
    flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for bad in (*flipped, data[:-1], data + b"0", data[:12], data[:5], b""):
        with pytest.raises(WireError):
            crypto.decrypt_share(key, bad, b"for")
    for other, purpose in ((os.urandom(32), b"for"), (key, b"other")):
        with pytest.raises(WireError):
            crypto.decrypt_share(other, data, purpose)


@pytest.mark.parametrize("u", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
def test_nobody_agrees_by_a_point_of_low_order(u):
    point = u.to_bytes(32, "little")
    assert not crypto.is_point(point)
    for refused in (lambda key: crypto.agree_secret(key, point, b"for"), lambda key: crypto.exchange_keys(key, point)):
        with pytest.raises(WireError, match="low order"):
            refused(os.urandom(32))
    assert crypto.is_point(crypto.public_key_of(os.urandom(32)))


def test_a_signature_is_of_one_key_and_one_text():
    key, text = os.urandom(32), b"text"
    public, signature = crypto.verifying_key(key), crypto.sign_bytes(key, text)
    assert crypto.is_signed(public, signature, text)
    for other in (
        (crypto.verifying_key(os.urandom(32)), signature, text),
        (public, crypto.sign_bytes(os.urandom(32), text), text),
        (public, signature, b"another"),
        (public, bytes(64), text),
        (public, signature[:-1], text),
        (bytes(31), signature, text),
    ):
        assert not crypto.is_signed(*other)


P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")


def _doubled(point: tuple[int, int]) -> tuple[int, int]:
    x, y = point
    cross = D * x * x * y * y
    return 2 * x * y * pow(1 + cross, -1, P) % P, (y * y + x * x) * pow(1 - cross, -1, P) % P


def _small_order_encodings() -> list[bytes]:
    """Every text of 32 bytes that stands for one of the 8 points of small order, whoever reads it mildly."""
    found = []
    root = pow(2, (P - 1) // 4, P)  # of -1
    for y in (0, 1, P - 1, ORDER_8, P - ORDER_8):
        x2 = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(x2, (P + 3) // 8, P)
        x = x if x * x % P == x2 else x * root % P
        assert x * x % P == x2
        assert _doubled(_doubled(_doubled((x, y)))) == (0, 1)
        for number in (y, y + P):
            if number < 2**255:
                found += [bytes((number | sign << 255).to_bytes(32, "little")) for sign in (0, 1)]
    return found


SMALL = _small_order_encodings()


def test_there_are_14_encodings_of_the_8_points_of_small_order():
    assert len(set(SMALL)) == 14


@pytest.mark.parametrize("key", SMALL, ids=bytes.hex)
def test_a_key_whose_signature_is_one_of_every_message_is_none(key):
    assert crypto.is_small_order(key)
    texts = [b"text %d" % n for n in range(64)]
    for signature in (SMALL[2] + bytes(32), bytes([1]) + bytes(63)):
        assert not any(crypto.is_signed(key, signature, text) for text in texts)


def test_the_library_alone_takes_such_a_key():
    """So the one above is no empty test: with R = A = the identity, S = 0 holds for every message."""
    identity = bytes([1]) + bytes(31)
    for key in (identity, identity[:31] + b"\x80"):
        Ed25519PublicKey.from_public_bytes(key).verify(identity + bytes(32), b"any text")


def test_a_key_above_the_prime_is_none_and_a_real_one_is():
    assert all(crypto.is_small_order(number.to_bytes(32, "little")) for number in (P, P + 2, P + 18, 2**256 - 1))
    for seed in range(50):
        assert not crypto.is_small_order(crypto.verifying_key(bytes([seed]) * 32))
    assert crypto.is_small_order(b"short")
