"""A statement as a message: bytes that another module parses, in `envelope.py`'s envelope. Does not import torch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import xxhash

from fedveil.contract.message_address import MessageAddress
from fedveil.errors import WireError
from fedveil.wire import header

if TYPE_CHECKING:
    from fedveil.contract.layout import Direction

_NAME = "statement"
_MOST_HEADER = 4096  # bytes


def pack_statement(data: bytes, round_: int, direction: Direction, address: MessageAddress) -> bytes:
    """Pack a statement as a message."""
    text = zlib.compress(header.write_header(_content(data, round_, direction)), 6)
    prefix = header.MAGIC + len(text).to_bytes(4, "little") + xxhash.xxh3_64_digest(text)[::-1] + address.digest
    return b"".join((prefix, text, bytes(-(header.PREFIX + len(text)) % 8), data, bytes(-len(data) % 8)))


def unpack_statement(message: bytes, round_: int, direction: Direction, address: MessageAddress, most: int) -> bytes:
    """Return the statement in a message of at most `most` bytes. Raises WireError for an invalid message."""
    if len(message) > most:
        raise WireError(f"message: expected at most {most} bytes for a statement, found {len(message)}")
    whole = memoryview(message)
    content, start = header.read_header(whole, _MOST_HEADER)
    if whole[16 : header.PREFIX] != address.digest:
        raise WireError(f"address: expected {address}; this message is of another run, attempt or site")
    size = content["fields"][0][3] if content["fields"] else 0
    data = bytes(whole[start : start + size])
    if content != _content(data, round_, direction) or whole[start + size :] != bytes(-size % 8):
        raise WireError(f"message: it is not one whole statement of round {round_}")
    return data


def _content(data: bytes, round_: int, direction: Direction) -> dict[str, Any]:
    return {
        "method": _NAME, "version": 1, "round": round_, "direction": direction, "turn": "", "variant": "",
        "layout": _NAME, "fields": [[_NAME, "opaque", [len(data)], len(data), xxhash.xxh3_64_hexdigest(data)]],
        "scalars": {}, "num_examples": None, "report": {},
    }  # fmt: skip
