"""Seeded codec: a key instead of Bernoulli masks.

Bytes: the 32 bytes of the key. Both ends expand the key to the same masks
(`fedveil.ops.random_masks.expand_mask`: ChaCha20, one byte per entry, and 4 more for one entry in 256).
Bits per entry: 256 divided by the number of mask entries, compared with 1 for `BitCodec`.

The value is only the key, so its shape is (32,) for masks of any shape. Anyone who sees the key knows
the masks, so send a key only if the masks need not be secret.

| case | what happens |
|---|---|
| empty mask | still 32 bytes |
| a tensor | WireError: a mask is not a key; draw a key and expand it |
"""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.contract.codec import Buffer, Value
from fedveil.errors import ConfigError, WireError

KEY_BYTES = 32


@dataclass(frozen=True)
class SeededMaskCodec:
    """Encodes the key for masks whose entries are True with probability `keep`."""

    keep: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.keep <= 1.0:
            raise ConfigError(f"keep: expected 0 to 1, found {self.keep}")

    @property
    def name(self) -> str:
        """Return the codec's name, such as "seeded chacha20 keep 0.25", with everything that changes the masks."""
        return f"seeded chacha20 keep {float(self.keep)!r}"

    def encode(self, value: Value) -> list[Buffer]:
        """Return the key."""
        return [_checked(value)]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> bytes:
        """Return a copy of the key."""
        if len(data) != KEY_BYTES:
            raise WireError(f"expected a key of {KEY_BYTES} bytes, found {len(data)}")
        return bytes(data)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return 32."""
        return KEY_BYTES

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return (32,)."""
        return (len(_checked(value)),)


def _checked(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise WireError(f"expected a key of {KEY_BYTES} bytes, found {type(value).__name__}")
    if len(value) != KEY_BYTES:
        raise WireError(f"expected a key of {KEY_BYTES} bytes, found {len(value)}")
    return value
