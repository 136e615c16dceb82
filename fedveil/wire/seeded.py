"""Seeded: a key in place of a Bernoulli mask.

Bytes: the 32 bytes of the key. Both ends expand them to the same mask, entries in row-major order, by
`fedveil.rng.Stream.bernoulli` under the key (AES-256 in counter mode; one byte an entry, and 4 more for one entry in
256). Bits per entry: 256 / entries of the mask, against 1 for `Bits`.

The value is the key alone, so its shape is (32,) for a mask of any shape; the caller of `expand` names the mask's
shape. Whoever sees the key knows the mask, so send a key only where the mask need not be secret.

| case | what happens |
|---|---|
| empty mask | still 32 bytes; `expand` gives an empty tensor |
| 0-d mask | one draw |
| keep = 0, keep = 1 | all False, all True, exactly |
| non-contiguous or CUDA tensor | WireError: a mask is not a key; draw a key and expand it |
| a larger shape, same key | its first entries are those of the smaller one |
| expanded mask | on the CPU, new |
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from fedveil.contract.codec import Buffer, Value
from fedveil.errors import ConfigError, WireError
from fedveil.rng import Stream

KEY_BYTES = 32


def expand(key: bytes, keep: float, shape: tuple[int, ...]) -> Bool[Tensor, "..."]:
    """The mask that a key stands for: each entry is True with probability `keep`, and equal on every machine."""
    return Stream(key).bernoulli(keep, shape)


@dataclass(frozen=True)
class Seeded:
    """The key of a mask whose entries are True with probability `keep`."""

    keep: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.keep <= 1.0:
            raise ConfigError(f"keep: expected 0 to 1, found {self.keep}")

    @property
    def name(self) -> str:
        """Such as "seeded keep 0.25", with every digit of `keep`, because each of them changes masks."""
        return f"seeded keep {float(self.keep)!r}"

    def encode(self, value: Value) -> list[Buffer]:
        """The key."""
        return [_checked(value)]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> bytes:
        """The key, copied."""
        if len(data) != KEY_BYTES:
            raise WireError(f"expected a key of {KEY_BYTES} bytes, found {len(data)}")
        return bytes(data)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Always 32."""
        return KEY_BYTES

    def shape(self, value: Value) -> tuple[int, ...]:
        """Always (32,)."""
        return (len(_checked(value)),)


def _checked(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise WireError(f"expected a key of {KEY_BYTES} bytes, found {type(value).__name__}")
    if len(value) != KEY_BYTES:
        raise WireError(f"expected a key of {KEY_BYTES} bytes, found {len(value)}")
    return value
