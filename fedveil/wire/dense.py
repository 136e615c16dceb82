"""Dense codec: the plain entries of a tensor.

Bytes: the entries in row-major order, each in the dtype's own little-endian format (IEEE 754 binary32 or binary16, or
bfloat16); no header, no padding. Bits per entry: exactly 32 for float32, 16 for float16 and bfloat16.

| case | what happens |
|---|---|
| empty tensor | 0 bytes |
| 0-d tensor | one entry |
| non-contiguous input | copied once, in row-major order of the view |
| CUDA tensor | copied to the CPU once; decoded tensors are on the CPU |
| contiguous CPU tensor | not copied: the encoded part is a view of it |
| NaN, infinities, -0.0, subnormals | every bit is preserved |
| a different dtype | WireError; the codec does not cast |
| decoded tensor | a view of the received bytes: do not write to it |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.contract.codec import Buffer, Value, count_elements, raw_bytes, view_bytes
from fedveil.errors import ConfigError, WireError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DenseCodec:
    """Encodes entries of one floating-point dtype, without a copy if possible."""

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(map(_word, _DTYPES))}, found {_word(self.dtype)}")

    @property
    def name(self) -> str:
        """Return the codec's name, such as "dense float32"."""
        return f"dense {_word(self.dtype)}"

    def encode(self, value: Value) -> list[Buffer]:
        """Return a view of the value."""
        return [raw_bytes(self._checked(value))]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        """Return a view of `data`."""
        if len(data) != (expected := self.nbytes(shape)):
            raise WireError(f"expected {expected} bytes for {self.name} of shape {shape}, found {len(data)}")
        return view_bytes(data, self.dtype, shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of entries times the dtype's size."""
        return count_elements(shape) * self.dtype.itemsize

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(self._checked(value).shape)

    def _checked(self, value: Value) -> Tensor:
        if not isinstance(value, Tensor):
            raise WireError(f"expected a {_word(self.dtype)} tensor, found {type(value).__name__}")
        if value.dtype != self.dtype:
            raise WireError(
                f"expected dtype {_word(self.dtype)}, found {_word(value.dtype)}; cast it, or declare that dtype"
            )
        return value


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
