"""Reading the envelope's header. Imports no torch, for processes that pass a message on without decoding it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

import xxhash

from fedveil.errors import WireError

MAGIC = b"FVL1"
PREFIX = 16
_MAX_HEADER = 16 << 20  # bytes when decompressed; only a million fields would need more


def read(whole: memoryview) -> tuple[dict[str, Any], int]:
    """The header at the beginning of a message, and the offset of the first field. Raises WireError."""
    if len(whole) < PREFIX or whole[:4] != MAGIC:
        raise WireError(f"message: expected the magic {MAGIC!r}, found {bytes(whole[:4])!r} in {len(whole)} bytes")
    length = int.from_bytes(whole[4:8], "little")
    header = whole[PREFIX : PREFIX + length]
    if len(header) < length:
        raise WireError(f"header: expected {length} bytes, found {len(header)}: the message is truncated")
    if xxhash.xxh3_64_digest(header)[::-1] != whole[8:16]:
        raise WireError("header: expected the checksum of its bytes, found another: the message was damaged on the way")
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(header, _MAX_HEADER)
        content = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise WireError(f"header: expected zlib of at most {_MAX_HEADER} bytes of JSON, found none ({error})") from None
    keys = {
        "method",
        "version",
        "round",
        "direction",
        "variant",
        "layout",
        "fields",
        "scalars",
        "num_examples",
        "report",
    }
    if not isinstance(content, dict) or set(content) != keys:
        raise WireError(f"header: expected an object of {sorted(keys)}, found {sorted(content)[:20]}")
    for key in ("scalars", "report"):
        if not isinstance(content[key], dict):
            raise WireError(f"header.{key}: expected an object, found {str(content[key])[:80]}")
    _check_entries(content["fields"])
    return content, PREFIX + length + -(PREFIX + length) % 8


def _check_entries(entries: Any) -> None:
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [str(), str(), list(shape), size, str()] if all(type(n) is int and n >= 0 for n in [*shape, size]):
                continue
        raise WireError(f"header.fields: expected [name, codec, shape, bytes, checksum], found {str(entry)[:80]}")


def of_slices(slices: Iterable[bytes]) -> dict[str, Any]:
    """The header of a message in slices; reads only as many slices as it needs. Raises WireError."""
    whole = bytearray()
    for part in slices:
        whole += part
        if len(whole) >= PREFIX and len(whole) >= PREFIX + int.from_bytes(whole[4:8], "little"):
            break
    return read(memoryview(whole))[0]
