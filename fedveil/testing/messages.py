"""The bytes of a message: its slices, its header, and its codes of quantized values.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.wire.chunking import STYPE, slice_key, slice_message
from fedveil.wire.header import header_of_slices, read_header
from fedveil.wire.quantized import code_word

__all__ = [
    "STYPE",
    "code_word",
    "header_of_slices",
    "read_header",
    "slice_key",
    "slice_message",
]
