"""What a codec is. Each codec is a leaf type in a file of its own, encode and decode side by side."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Coded:
    """Block-wise codes: `codes` are level indices (uint8, any shape), `scales` one fp32 a block of the flat tensor."""

    codes: Tensor
    scales: Tensor


Value = Tensor | Coded | bytes


class Codec(Protocol):
    """Turns one value into bytes and back.

    `decode(encode(x))` is `x`, bit for bit. `nbytes` is the formula that a test compares with the bytes; only the
    bytes are ever reported.
    """

    @property
    def name(self) -> str:
        """Full description, part of the layout's digest: "dense float32", "codes 5 block 256", ..."""
        ...

    def encode(self, value: Value) -> list[Buffer]:
        """The value's bytes, as parts to be joined; parts may be views of the value."""
        ...

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Value:
        """The value; may be a read-only view of `data`. Raises WireError."""
        ...

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a value of that shape."""
        ...

    def shape(self, value: Value) -> tuple[int, ...]:
        """Shape of a value, for the envelope. Raises WireError for a value of another kind or dtype."""
        ...


def numel(shape: tuple[int, ...]) -> int:
    """Entries of a tensor of that shape."""
    return math.prod(shape)


def raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous and on the CPU."""
    if tensor.numel() == 1:
        tensor = tensor.reshape(())  # torch calls one entry contiguous whatever its stride, yet cannot view it as bytes
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def view(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes as a tensor, without a copy. The tensor must not be written to."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns that writes to a read-only buffer are undefined; nothing here writes.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype).reshape(shape)
