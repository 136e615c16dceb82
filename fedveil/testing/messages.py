"""Bytes of a message: its slices, its header, and the code of a quantized value.

Not covered by compatibility.
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
