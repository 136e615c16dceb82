"""Opaque codec: bytes in a format that another module checks, such as a secure aggregation statement.

Bytes: the value itself. Its shape is its length.

| case | what happens |
|---|---|
| no bytes | 0 bytes |
| a tensor | WireError |
| decoded value | copied |
"""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.contract.codec import Buffer, Value
from fedveil.errors import WireError


@dataclass(frozen=True)
class RawBytesCodec:
    """Encodes bytes with any content."""

    @property
    def name(self) -> str:
        """Return "opaque"."""
        return "opaque"

    def encode(self, value: Value) -> list[Buffer]:
        """Return the bytes."""
        return [_checked(value)]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> bytes:
        """Return a copy of the bytes."""
        if (len(data),) != shape:
            raise WireError(f"expected bytes of shape {shape}, found {len(data)}")
        return bytes(data)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the length."""
        return shape[0]

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the length."""
        return (len(_checked(value)),)


def _checked(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise WireError(f"expected bytes, found {type(value).__name__}")
    return value
