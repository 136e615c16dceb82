"""Streams of integers: by hand, against pycryptodome's AES, and what is left when they cancel."""

from __future__ import annotations

import numpy as np
import pytest
from Crypto.Cipher import AES

from fedveil.federation.secagg.mask_streams import MaskStream, add_masks
from fedveil.federation.secagg.unmasking import negate_mask
from tests.fedveil.federation.secagg.sites import drawn

AB, AC, BC = (MaskStream(bytes([i]) * 32, 1) for i in (1, 2, 3))


def stream(key: bytes, length: int, bits: int) -> np.ndarray:
    """Of pycryptodome: AES-256, a counter of 16 bytes from 0."""
    cipher = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0)
    return np.frombuffer(cipher.encrypt(bytes(length * bits // 8)), f"<u{bits // 8}")


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("length", [0, 1, 3, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_003])
def test_a_mask_is_the_key_stream_added_or_subtracted(length, bits):
    """Longer ones go chunk by chunk, with several masks side by side."""
    vector, one, two = drawn(length, 4, bits), MaskStream(b"a" * 32, 1), MaskStream(b"b" * 32, -1)
    wanted = vector + stream(one.key, length, bits) - stream(two.key, length, bits)
    add_masks(vector, [one, two])
    assert np.array_equal(vector, wanted)


def test_masks_of_two_sites_cancel_by_hand():
    a, b = np.array([7, 0, 2**32 - 1], "<u4"), np.array([5, 0, 2], "<u4")
    add_masks(a, [AB])
    add_masks(b, [negate_mask(AB)])
    drawn_by_both = stream(AB.key, 3, 32).astype(object)
    assert a.tolist() == [(x + m) % 2**32 for x, m in zip([7, 0, 2**32 - 1], drawn_by_both, strict=True)]
    assert b.tolist() == [(x - m) % 2**32 for x, m in zip([5, 0, 2], drawn_by_both, strict=True)]
    assert (a + b).tolist() == [12, 0, 1]


def test_masks_of_three_sites_cancel_by_hand():
    a, b, c = (np.array(x, "<u4") for x in ([1, 10], [2, 20], [3, 2**32 - 20]))
    add_masks(a, [AB, AC])
    add_masks(b, [negate_mask(AB), BC])
    add_masks(c, [negate_mask(AC), negate_mask(BC)])
    assert (a + b + c).tolist() == [6, 10]
    assert (a + b).tolist() != [3, 30]  # two of the three: what they share with the third stays


def test_a_mask_and_its_negative_leave_the_vector():
    vector = drawn(70_001, 9)
    add_masks(vector, [AB, negate_mask(AC)])
    add_masks(vector, [negate_mask(AB), AC])
    assert np.array_equal(vector, drawn(70_001, 9))
