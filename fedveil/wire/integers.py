"""Integer codec: the entries of a vector modulo 2^bits.

Bytes: the entries in order, little endian; no header, no padding. Bits per entry: exactly 32 or 64. The value is an
int32 or int64 tensor with the same bits as the entries.

| case | what happens |
|---|---|
| empty tensor | 0 bytes |
| contiguous CPU tensor | not copied: the encoded part is a view of it |
| a different dtype | WireError; the codec does not cast |
| decoded tensor | a view of the received bytes: do not write to it |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.contract.codec import Buffer, Value, count_elements, raw_bytes, view_bytes
from fedveil.errors import ConfigError, WireError

_DTYPES = {32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class IntegerCodec:
    """Encodes entries modulo 2^bits."""

    bits: int = 32

    def __post_init__(self) -> None:
        if self.bits not in _DTYPES:
            raise ConfigError(f"bits: expected 32 or 64, found {self.bits}")

    @property
    def name(self) -> str:
        """Return the codec's name, such as "integers 32"."""
        return f"integers {self.bits}"

    def encode(self, value: Value) -> list[Buffer]:
        """Return a view of the value."""
        return [raw_bytes(self._checked(value))]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        """Return a view of `data`."""
        if len(data) != (expected := self.nbytes(shape)):
            raise WireError(f"expected {expected} bytes for {self.name} of shape {shape}, found {len(data)}")
        return view_bytes(data, _DTYPES[self.bits], shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of entries times the bytes per entry."""
        return count_elements(shape) * self.bits // 8

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(self._checked(value).shape)

    def _checked(self, value: Value) -> Tensor:
        if not isinstance(value, Tensor) or value.dtype != _DTYPES[self.bits]:
            actual_type = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise WireError(f"expected a tensor of {_DTYPES[self.bits]}, found {actual_type}")
        return value
