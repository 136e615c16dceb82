"""Forge messages as a hostile sender could, with arbitrary headers and correct checksums."""

from __future__ import annotations

import json
import zlib
from typing import Any

import xxhash

from fedveil.wire.header import PREFIX


def text_of(data: bytes) -> bytes:
    """Return the header of a valid message as JSON text."""
    return zlib.decompress(data[PREFIX : PREFIX + _length(data)])


def header_of(data: bytes) -> dict[str, Any]:
    """Return the header of a valid message, parsed."""
    return json.loads(text_of(data))


def with_compressed(data: bytes, header: bytes) -> bytes:
    """Return the message with `header` in place of the compressed header."""
    start = PREFIX + _length(data)
    prefix = data[:4] + len(header).to_bytes(4, "little") + xxhash.xxh3_64_digest(header)[::-1] + data[16:PREFIX]
    return prefix + header + bytes(-(PREFIX + len(header)) % 8) + data[start + -start % 8 :]


def with_text(data: bytes, text: bytes) -> bytes:
    """Return the message with `text` in place of the header's JSON."""
    return with_compressed(data, zlib.compress(text))


def with_header(data: bytes, **changes: Any) -> bytes:
    """Return the message with header values changed."""
    return with_text(data, json.dumps(header_of(data) | changes, separators=(",", ":")).encode())


def _length(data: bytes) -> int:
    return int.from_bytes(data[4:8], "little")
