"""Random numbers from named streams.

A stream is a keyed generator: BLAKE2b over (secret, round, client, purpose) gives the key, and AES-256 in counter mode
gives the bytes. They cannot be predicted without the secret; with it, the same call gives the same draws on every
machine. Cohorts, columns, keys and seeds are drawn from the stream itself; another cipher (`fedveil.ops.chacha20`)
expands such a key into masks over tensor entries. `torch_generator` is for initial weights and batch order, which
need not be secret.

Noise that protects people comes from the operating system (`fedveil.privacy`), never from a stream, except in a
deterministic run, which guarantees nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

__all__ = [
    "SECRET_BYTES",
    "RandomStream",
    "derive_secret",
    "draw_booleans",
    "fresh_secret",
    "initial_stream",
    "probability_threshold",
]

SECRET_BYTES = 32
_BLOCK = 1 << 20  # mask entries drawn at a time, so that they stay in the cache


def fresh_secret() -> bytes:
    """Return a secret from the operating system."""
    return os.urandom(SECRET_BYTES)


def derive_secret(side: str, seed: int, deterministic: bool) -> bytes:
    """Return a secret for `side`: "server", or "client:" plus the site's name. If `deterministic`, it depends only on
    `seed` and `side`."""
    return _digest(f"fedveil deterministic {seed} {side}".encode()) if deterministic else fresh_secret()


def initial_stream(seed: int, purpose: str) -> RandomStream:
    """Return a stream for public draws before round 0, so that all runs with the same seed start from equal weights."""
    return RandomStream.derive(_digest(f"fedveil initial {seed}".encode()), 0, "", purpose)


def _digest(*parts: bytes) -> bytes:
    h = hashlib.blake2b(digest_size=32)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


def _keystream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def probability_threshold(probability: float) -> tuple[int, int]:
    """Return the value that a byte is compared with, and the 24 bits that decide a tie.

    Raises:
        ValueError: it is not a probability.
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability: expected 0 to 1, found {probability}")
    return divmod(round(probability * 2**32), 2**24)


def draw_booleans(
    keystream: CipherContext, ties: Callable[[], CipherContext], probability: float, shape: tuple[int, ...]
) -> Tensor:
    """Return independent booleans, each True with `probability` (to within 2**-32; exactly at 0 and 1).

    One byte of `keystream` decides each entry, unless it equals the threshold's first byte. Such an entry, one in 256,
    is decided by comparing 24 bits of the next word of `ties` with the rest of the threshold. Raises ValueError like
    `probability_threshold`.
    """
    first, rest = probability_threshold(probability)
    n = int(np.prod(shape, dtype=np.int64))
    out = np.empty(n, dtype=bool)
    words_of = ties() if rest else None  # shared by all blocks: a new one for each block would repeat its words
    for start in range(0, n, _BLOCK):
        drawn = np.frombuffer(keystream.update(bytes(min(_BLOCK, n - start))), dtype=np.uint8)
        block = out[start : start + _BLOCK]
        np.less(drawn, first, out=block)
        if words_of:
            tied = np.flatnonzero(drawn == first)
            words = np.frombuffer(words_of.update(bytes(4 * len(tied))), dtype="<u4") >> 8
            block[tied] = words < rest
    return torch.from_numpy(out).reshape(shape)


@dataclass
class RandomStream:
    """A stream of random bytes under a 32-byte key. Draws advance it."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"key: expected 32 bytes, found {len(self.key)}")
        self._keystream = _keystream(self.key)

    @classmethod
    def derive(cls, secret: bytes, round_: int, client: str, purpose: str) -> RandomStream:
        """Return the stream for one purpose of one client in one round."""
        return cls(_digest(secret, str(round_).encode(), client.encode(), purpose.encode()))

    def bytes(self, n: int) -> bytes:
        """Return the next n bytes."""
        return self._keystream.update(bytes(n))

    def split(self, purpose: str) -> RandomStream:
        """Return another stream, derived from this stream's key; this stream's draws stay the same."""
        return RandomStream(_digest(self.key, b"split", purpose.encode()))

    def bernoulli(self, probability: float, shape: tuple[int, ...]) -> Tensor:
        """Return independent booleans, like `draw_booleans`; the ties' key is the digest of this key and "ties"."""
        return draw_booleans(self._keystream, lambda: self._ties, probability, shape)

    @cached_property
    def _ties(self) -> CipherContext:
        return _keystream(_digest(self.key, b"ties"))

    def choice(self, n: int, k: int) -> list[int]:
        """Draw k distinct integers from 0 to n - 1 uniformly; return them in the order drawn."""
        if not 0 <= k <= n:
            raise ValueError(f"k: expected 0 to {n}, found {k}")
        pool = list(range(n))
        for i in range(k):  # Fisher-Yates
            j = i + self._below(n - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:k]

    def _below(self, bound: int) -> int:
        limit = 2**64 - 2**64 % bound  # rejection keeps every value equally likely
        while (word := int.from_bytes(self.bytes(8), "little")) >= limit:
            pass
        return word % bound

    def torch_generator(self) -> torch.Generator:
        """Return a torch generator on the CPU, seeded from this stream. Not for secrets."""
        return torch.Generator().manual_seed(int.from_bytes(self.bytes(8), "little") >> 1)
