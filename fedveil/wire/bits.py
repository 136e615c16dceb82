"""Bit codec: a boolean tensor, one bit per entry.

Bytes: entry i, in row-major order, is bit i % 8 (bit 0 is the least significant) of byte i // 8; True is 1. Up to 7
padding bits after the last entry are 0. Bits per entry: 1, plus less than one byte per tensor.

| case | what happens |
|---|---|
| empty tensor | 0 bytes |
| 0-d tensor | one byte, 0 or 1 |
| non-contiguous input | copied once, in row-major order of the view |
| CUDA tensor | packed on its device, then copied to the CPU once; decoded tensors are on the CPU |
| a pad bit that is 1 | WireError: two messages must not mean the same tensor |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.contract.codec import Buffer, Value, count_elements, raw_bytes
from fedveil.errors import WireError


@dataclass(frozen=True)
class BitCodec:
    """Packs booleans, eight per byte."""

    @property
    def name(self) -> str:
        """Return "bits"."""
        return "bits"

    def encode(self, value: Value) -> list[Buffer]:
        """Return the packed bits."""
        entries = _checked(value)
        if entries.device.type != "cpu":
            return [raw_bytes(_pack_there(entries.reshape(-1)))]
        return [np.packbits(np.frombuffer(raw_bytes(entries), dtype=bool), bitorder="little").data]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        """Return a new boolean tensor."""
        count = count_elements(shape)
        if len(data) != (expected := self.nbytes(shape)):
            raise WireError(f"expected {expected} bytes for {count} bits of shape {shape}, found {len(data)}")
        if count % 8 and (padding := data[-1] >> count % 8):
            raise WireError(f"expected {-count % 8} zero bits of padding after {count} bits, found {padding:#b}")
        entries = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count, bitorder="little")
        return torch.from_numpy(entries.view(bool)).reshape(shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of entries divided by eight, rounded up."""
        return -(-count_elements(shape) // 8)

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(_checked(value).shape)


def _checked(value: Value) -> Tensor:
    if not isinstance(value, Tensor):
        raise WireError(f"expected a bool tensor, found {type(value).__name__}")
    if value.dtype != torch.bool:
        raise WireError(f"expected dtype bool, found {str(value.dtype).removeprefix('torch.')}")
    return value


def _pack_there(entries: Tensor) -> Tensor:
    """Pack flat entries into bytes on their own device."""
    padded = torch.zeros(-(-len(entries) // 8) * 8, dtype=torch.uint8, device=entries.device)
    padded[: len(entries)] = entries
    return (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=entries.device)).sum(1, dtype=torch.uint8)
