"""Read one field of a message: its checksum, its norm and its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from fedveil.contract.codec import DeviceDecodable, Value
from fedveil.contract.layout import WireField
from fedveil.errors import WireError
from fedveil.wire import header, validation

_BLOCK_BYTES = 1 << 22  # a block of this size stays in the cache between checksum and norm
_HALF_BLOCK_BYTES = 1 << 19  # for half precision, which the norm widens to twice the size


@dataclass(frozen=True)
class FieldReadJob:
    """A field to read.

    Attributes:
        data: bytes of the field.
        declared: the field as declared in the layout.
        entry: the field's entry in the header: name, codec, shape, bytes, checksum.
        device: device for device-decodable codecs; None decodes on the CPU immediately.
    """

    data: memoryview
    declared: WireField
    entry: list[Any]
    device: torch.device | None

    @property
    def name(self) -> str:
        """Return the field's name."""
        return str(self.entry[0])

    def read(self) -> tuple[Callable[[], Value], float | None]:
        """Return a function that returns the value, and the value's norm if it is floating-point.

        One pass reads the bytes for both checksum and norm. Raises WireError. If the value is decoded on a device,
        the returned function also raises WireError for faults that only decoding reveals.
        """
        name, codec_name, listed, _, checksum = self.entry
        codec, shape = self.declared.codec, tuple(listed)
        if codec_name != codec.name:
            raise WireError(f"{name}: expected codec {codec.name}, found {header.short_value(codec_name)}")
        validation.check_shape(self.declared, shape)
        if len(self.data) != (size := codec.nbytes(shape)):
            raise WireError(f"{name}: expected {size} bytes for shape {shape}, found {len(self.data)}")
        if self.device is not None and isinstance(codec, DeviceDecodable):
            self._check_sum(checksum, None)
            return partial(self._named, partial(codec.decode_on, self.data, shape, self.device)), None
        value = self._named(partial(codec.decode, self.data, shape))
        floats = value.flatten() if isinstance(value, Tensor) and value.is_floating_point() else None
        norm = self._check_sum(checksum, floats)
        return lambda: value, norm

    def _named(self, decode: Callable[[], Value]) -> Value:
        """Decode the value, and name the field in any WireError."""
        try:
            return decode()
        except WireError as error:
            raise WireError(f"{self.name}: {error}") from None

    def _check_sum(self, expected: str, floats: Tensor | None) -> float | None:
        """Return the norm of the floats. Raises WireError if the checksum does not match."""
        data, squares = self.data, 0.0
        is_half = floats is not None and floats.itemsize == 2
        block_bytes = _HALF_BLOCK_BYTES if is_half else _BLOCK_BYTES
        # Allocate once per field, because allocation causes page faults.
        wide = torch.empty(min(len(data), block_bytes) // 2 if is_half else 0)
        hasher = xxhash.xxh3_64()
        for start in range(0, len(data), block_bytes):
            hasher.update(data[start : start + block_bytes])
            if floats is not None:
                block = floats[start // floats.itemsize : (start + block_bytes) // floats.itemsize]
                block = wide[: len(block)].copy_(block) if is_half else block.float()
                squares += float(torch.dot(block, block))
        if hasher.hexdigest() != expected:
            raise WireError(
                f"{self.name}: expected checksum {header.short_value(expected)}, found {hasher.hexdigest()}: the "
                "field was damaged in transit"
            )
        return None if floats is None else math.sqrt(squares)
