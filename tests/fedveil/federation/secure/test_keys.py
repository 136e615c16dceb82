"""Keys bound to what they are for; against pycryptodome where it has the same."""

from __future__ import annotations

import os

import pytest
from Crypto.Cipher import AES
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.federation.secure import keys

PARTS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 99)), max_size=4)


@given(one=PARTS, two=PARTS)
def test_other_parts_are_another_text(one, two):
    same = [(type(p), p) for p in one] == [(type(p), p) for p in two]
    assert (keys.about("x", *one) == keys.about("x", *two)) == same
    assert keys.about("x", *one) != keys.about("y", *one)


def test_parts_cannot_run_into_each_other():
    assert keys.about("mask share", "d", "a", "bc") != keys.about("mask share", "d", "ab", "c")
    assert keys.about("x", 1) != keys.about("x", "1")
    assert keys.about("x", 'a","b') != keys.about("x", "a", "b")


def test_both_ends_agree_on_a_key_for_one_purpose():
    alice, bob = os.urandom(32), os.urandom(32)
    one = keys.agreed(alice, keys.public_of(bob), b"for", b"salt")
    assert one == keys.agreed(bob, keys.public_of(alice), b"for", b"salt")
    others = [
        keys.agreed(alice, keys.public_of(bob), b"other", b"salt"),
        keys.agreed(alice, keys.public_of(bob), b"for", b"tlas"),
        keys.agreed(alice, keys.public_of(bob), b"for"),
        keys.agreed(alice, keys.public_of(alice), b"for", b"salt"),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("salt", [b"", b"salt"])
def test_derivation_is_that_of_another_library(salt):
    secret = os.urandom(32)
    assert keys.derived(secret, b"purpose", salt) == HKDF(secret, 32, salt, SHA256, context=b"purpose")


def test_the_private_key_of_a_seed_is_derived():
    seed = bytes(range(16))
    assert keys.private_of(seed) == HKDF(seed, 32, b"", SHA256, context=keys.about("prekey"))
    assert keys.public_of(keys.private_of(seed)) != keys.public_of(keys.private_of(bytes(16)))


def test_what_is_closed_is_aes_gcm_of_another_library():
    key, text = os.urandom(32), os.urandom(16)
    data = keys.closed(key, text, b"for")
    cipher = AES.new(key, AES.MODE_GCM, nonce=data[:12])
    cipher.update(b"for")
    assert cipher.decrypt_and_verify(data[12:-16], data[-16:]) == text
    assert len(data) == 44
    assert keys.opened(key, data, b"for") == text
    assert keys.closed(key, text, b"for") != data


def test_nothing_is_opened_of_another_key_purpose_or_byte():
    key, text = os.urandom(32), os.urandom(16)
    data = keys.closed(key, text, b"for")
    flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for bad in (*flipped, data[:-1], data + b"0", data[:12], data[:5], b""):
        with pytest.raises(WireError):
            keys.opened(key, bad, b"for")
    for other, purpose in ((os.urandom(32), b"for"), (key, b"other")):
        with pytest.raises(WireError):
            keys.opened(other, data, purpose)


@pytest.mark.parametrize("u", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18])
def test_nobody_agrees_by_a_point_of_low_order(u):
    point = u.to_bytes(32, "little")
    assert not keys.is_point(point)
    with pytest.raises(WireError, match="low order"):
        keys.agreed(os.urandom(32), point, b"for")
    assert keys.is_point(keys.public_of(os.urandom(32)))


def test_a_signature_is_of_one_key_and_one_text():
    key, text = os.urandom(32), b"text"
    public, signature = keys.verifying_key(key), keys.signed(key, text)
    assert keys.is_signed(public, signature, text)
    for other in (
        (keys.verifying_key(os.urandom(32)), signature, text),
        (public, keys.signed(os.urandom(32), text), text),
        (public, signature, b"another"),
        (public, bytes(64), text),
        (public, signature[:-1], text),
        (bytes(31), signature, text),
    ):
        assert not keys.is_signed(*other)
