"""The interface of a codec. Each codec has its own file, with encode and decode side by side."""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "Buffer",
    "Codec",
    "DeviceDecodable",
    "QuantizedTensor",
    "Value",
    "count_elements",
    "raw_bytes",
    "view_bytes",
]

Buffer = bytes | bytearray | memoryview | mmap.mmap


@dataclass(frozen=True)
class QuantizedTensor:
    """Block-wise codes: `codes` are level indices (uint8, any shape); `scales` has one fp32 value per block."""

    codes: Tensor
    scales: Tensor


Value = Tensor | QuantizedTensor | bytes


class Codec(Protocol):
    """Encode one value as bytes, and decode it.

    `decode(encode(x))` is `x`, bit for bit. `nbytes` is a formula; a test compares it with the encoded size.
    Reports always count the actual bytes.
    """

    @property
    def name(self) -> str:
        """Return the full description, part of the layout's digest: "dense float32", "codes 5 block 256", ..."""
        ...

    def encode(self, value: Value) -> list[Buffer]:
        """Return the value's bytes, as parts to be joined; a part may be a view of the value."""
        ...

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Value:
        """Return the value, possibly as a read-only view of `data`. Raises WireError."""
        ...

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the encoded size in bytes of a value of this shape."""
        ...

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the value's shape, for the envelope. Raises WireError for a value of the wrong type or dtype."""
        ...


@runtime_checkable
class DeviceDecodable(Protocol):
    """A codec whose values are larger than their bytes, so that the bytes can be decoded on another device."""

    def decode_on(self, data: memoryview, shape: tuple[int, ...], device: torch.device) -> Value:
        """Decode as `decode` does, but on `device`. Raises WireError."""
        ...


def count_elements(shape: tuple[int, ...]) -> int:
    """Return the number of entries in a tensor of this shape."""
    return math.prod(shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous and on the CPU."""
    if tensor.numel() == 1:
        tensor = tensor.reshape(())  # torch considers one entry contiguous for any stride, but cannot view it as bytes
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def view_bytes(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that shares memory with the bytes. Callers must not write to it."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


# torch warns once per process that writing to a read-only buffer is undefined. Nothing here writes, so the warning is
# triggered and suppressed once. Changing filters around each view costs more than the view and is not thread-safe.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
