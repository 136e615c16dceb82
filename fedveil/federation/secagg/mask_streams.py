"""Streams of uniform integers that hide a vector when added to it; a party that knows the key can remove them.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)    mod 2^w, with sites ordered by name

PRG is AES-256 in counter mode under a 32-byte key. In the sum over all sites, the pairwise masks cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Integers = NDArray[Any]  # unsigned, all of one width

KEY_BYTES = 32
_CHUNK_BYTES = 1 << 18  # small enough that key stream, zeros and vector stay in the cache
_AES_BLOCK = 16


@dataclass(frozen=True)
class MaskStream:
    """A stream of integers, added (+1) or subtracted (-1)."""

    key: bytes
    sign: int


def add_masks(vector: Integers, masks: Iterable[MaskStream]) -> None:
    """Add the masks to a vector of unsigned integers, in place."""
    streams = [(Cipher(algorithms.AES(mask.key), modes.CTR(bytes(16))).encryptor(), mask.sign) for mask in masks]
    zeros, chunk = bytes(_CHUNK_BYTES), _CHUNK_BYTES // vector.itemsize
    drawn = bytearray(_CHUNK_BYTES + _AES_BLOCK)
    for start in range(0, len(vector), chunk):
        part = vector[start : start + chunk]
        size = len(part) * vector.itemsize
        for stream, sign in streams:
            stream.update_into(zeros if size == _CHUNK_BYTES else zeros[:size], drawn)
            integers = np.frombuffer(drawn, dtype=vector.dtype, count=len(part))
            (np.add if sign > 0 else np.subtract)(part, integers, out=part)
