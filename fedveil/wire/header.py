"""Read the envelope's header. Does not import torch, for processes that forward a message without decoding it."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from fedveil.errors import WireError

if TYPE_CHECKING:
    from fedveil.contract.codec import Buffer

MAGIC = b"FVL3"
PREFIX = 32
GREATEST = 1 << 53  # every integer up to it is exact as a float, in JSON parsers of any language
TURN = re.compile(r"([0-9a-f]{16})?")  # the site's name for one client round
_MAX_HEADER = 16 << 20  # maximum decompressed bytes; only a million fields would need more
_TYPES: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "version": (int,),
    "round": (int,),
    "direction": (str,),
    "turn": (str,),
    "variant": (str,),
    "layout": (str,),
    "fields": (list,),
    "scalars": (dict,),
    "num_examples": (int, float, type(None)),  # upload validation refuses a count that is not an int
    "report": (dict,),
}


def read_header(whole: memoryview, most: int = _MAX_HEADER) -> tuple[dict[str, Any], int]:
    """Return a message's header and the offset of its first field.

    Raises:
        WireError: there is no header, or it has more than `most` bytes, compressed or not.
    """
    if len(whole) < PREFIX or whole[:4] != MAGIC:
        raise WireError(f"message: expected the magic {MAGIC!r}, found {bytes(whole[:4])!r} in {len(whole)} bytes")
    length = int.from_bytes(whole[4:8], "little")
    if length > most:
        raise WireError(f"header: expected at most {most} bytes for the message's layout, found {length}")
    header = whole[PREFIX : PREFIX + length]
    if len(header) < length:
        raise WireError(f"header: expected {length} bytes, found {len(header)}: the message is truncated")
    if xxhash.xxh3_64_digest(header)[::-1] != whole[8:16]:
        raise WireError("header: its checksum does not match its bytes; the message was damaged in transit")
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(header, most)
        content = json.loads(text, parse_int=_bounded)
    except (zlib.error, ValueError, RecursionError) as error:
        raise WireError(f"header: it is not zlib data of at most {most} bytes of JSON ({error})") from None
    _check_content(content)
    if not inflate.eof or inflate.unused_data or text != write_header(content):
        raise WireError("header: it is not one zlib stream of JSON in the sender's form")
    start = PREFIX + length + -(PREFIX + length) % 8
    check_padding("header", whole[PREFIX + length : start])
    return content, start


def write_header(content: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of a header: keys in the order of `_TYPES`, scalars and report sorted, no spaces."""
    ordered = {key: content[key] for key in _TYPES}
    ordered |= {key: dict(sorted(content[key].items())) for key in ("scalars", "report")}
    return json.dumps(ordered, separators=(",", ":")).encode()


def check_padding(name: str, padding: memoryview) -> None:
    """Raise WireError unless the bytes after a field or the header are zero."""
    if any(padding):
        raise WireError(f"{name}: the padding after it must be zero bytes, found {bytes(padding[:8]).hex()}")


def printable_name(text: str) -> str:
    """Sanitize an untrusted name: no escape codes or bidirectional marks, at most 80 characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def short_value(value: Any) -> str:
    """Format an untrusted value for an error: short, and without traversing lists and objects."""
    return type(value).__name__ if isinstance(value, list | dict) else repr(value)[:80]


def _bounded(digits: str) -> int:
    if len(digits) > 17 or abs(number := int(digits)) > GREATEST:
        raise ValueError(f"a number is above {GREATEST}: it has {len(digits)} characters, {digits[:20]}")
    return number


def _check_content(content: Any) -> None:
    """Raise WireError unless the header has all keys with values of the right types."""
    keys = list(content) if isinstance(content, dict) else [type(content).__name__]
    if not isinstance(content, dict) or set(content) != set(_TYPES):
        raise WireError(f"header: expected an object of {sorted(_TYPES)}, found {keys[:20]}")
    for key, types in _TYPES.items():
        if type(content[key]) not in types:
            expected = " or ".join(t.__name__ for t in types)
            raise WireError(f"header.{key}: expected {expected}, found {short_value(content[key])}")
    if not TURN.fullmatch(content["turn"]):
        raise WireError(f"header.turn: expected 16 hex digits or nothing, found {short_value(content['turn'])}")
    for entry in content["fields"]:
        match entry:
            case [str(), str(), list(shape), size, str()] if all(type(n) is int and n >= 0 for n in [*shape, size]):
                continue
        raise WireError(f"header.fields: expected [name, codec, shape, bytes, checksum], found {short_value(entry)}")


def digest_of_parts(parts: Iterable[Buffer]) -> str:
    """Return the `message_digest` of the message that consists of these parts. Only the header is copied."""
    head, hasher = bytearray(), hashlib.sha256()
    for part in parts:
        view = memoryview(part).cast("B")
        while view and (missing := _header_size(head) - len(head)) > 0:
            taken, view = view[:missing], view[missing:]
            head += taken
            if _header_size(head) == len(head):
                hasher.update(write_header(read_header(memoryview(head))[0]))
        hasher.update(view)
    if _header_size(head) > len(head):
        read_header(memoryview(head))  # raises a better error if more than padding is missing
        raise WireError("header: the padding after it is missing: the message is truncated")
    return hasher.hexdigest()


def _header_size(head: bytearray) -> int:
    """Return the size of prefix, header and padding in bytes, judging from the first bytes."""
    if len(head) < PREFIX:
        return PREFIX
    end = PREFIX + int.from_bytes(head[4:8], "little")
    return end + -end % 8


def message_digest(data: Buffer) -> str:
    """Return the SHA-256 of a message's content, 64 hex digits, independent of address and header compression.

    Raises WireError if the header cannot be read.
    """
    return digest_of_parts([memoryview(data).cast("B")])


def header_of_slices(slices: Iterable[bytes]) -> dict[str, Any]:
    """Return the header of a sliced message, reading only as many slices as needed. Raises WireError."""
    whole = bytearray()
    for part in slices:
        whole += part
        if len(whole) >= PREFIX and len(whole) >= PREFIX + int.from_bytes(whole[4:8], "little"):
            break
    return read_header(memoryview(whole))[0]
