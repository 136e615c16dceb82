"""Mutate messages and text files, as a hostile sender or a broken disk would (see tests/test_fuzz.py).

A message is mutated as a sender could change it: damage bytes, truncate or extend the message, put any value anywhere
in the header, or change a field's bytes. Checksums are then corrected, because random mutations would never get them
right.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import xxhash

from tools.forge import header_of, with_compressed, with_text

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**53 + 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "0", "\x1b[31m", "\u202e", "x" * 5000, [], {}, [[]], {"": 0}, [0] * 2000),
)


_PIECES = (b"9" * 5000, b"[" * 3000, b"{" * 3000, b"\xff\xfe", b"\0", b'"', b"\n", b"nan", b"-1", b"1e999")


def message(data: bytes, draw: random.Random) -> bytes:
    """Apply one to three mutations to a valid message."""
    for _ in range(draw.randint(1, 3)):
        try:
            data = draw.choice(_MESSAGE)(data, draw)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
            data = _bytes(data, draw)  # an earlier mutation destroyed the header
    return data


def text(content: str, draw: random.Random) -> bytes:
    """Apply one to four mutations to a text file; the result may not be valid text."""
    return mutate_bytes(content.encode(), draw)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Apply one to four mutations to bytes of any kind."""
    for _ in range(draw.randint(1, 4)):
        data = draw.choice((_bytes, _cut, _extended, _doubled, _inserted))(data, draw)
    return data


def _bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:] if draw.random() < 0.5 else data[:end]


def _extended(data: bytes, draw: random.Random) -> bytes:
    return data + draw.choice((b"\0", bytes(8), data, draw.randbytes(17), bytes(1 << 16)))


def _doubled(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    return b"".join([*lines[:place], lines[draw.randrange(len(lines))], *lines[place:]])


def _inserted(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    what = draw.choice(
        (b"9" * 5000, b"[" * 3000, b"{" * 3000, b"\xff\xfe", b"\0", b'"', b"\n", b"nan", b"-1", b"1e999")
    )
    return data[:place] + what + data[place:]


def _header_value(data: bytes, draw: random.Random) -> bytes:
    """Put any value anywhere in the header."""
    header = header_of(data)
    place, key = header, draw.choice(list(header))
    while isinstance(place[key], list | dict) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.randrange(len(place)) if isinstance(place, list) else draw.choice(list(place))
    place[key] = draw.choice(VALUES)
    return with_text(data, json.dumps(header, separators=(",", ":")).encode())


def _header_shape(data: bytes, draw: random.Random) -> bytes:
    """Remove, duplicate or reorder keys and entries."""
    header = header_of(data)
    fields = header["fields"]
    draw.choice((
        lambda: fields.append(draw.choice(fields)),
        lambda: fields.pop(),
        lambda: draw.shuffle(fields),
        lambda: header.pop(draw.choice(list(header))),
        lambda: header["report"].update({draw.choice(("steps", "diagnosis")): draw.choice(VALUES)}),
        lambda: fields[0][2].append(1),
    ))()  # fmt: skip
    return with_text(data, json.dumps(header, separators=(",", ":")).encode())


def _header_text(data: bytes, draw: random.Random) -> bytes:
    return with_text(data, text(json.dumps(header_of(data), separators=(",", ":")), draw))


def _header_stream(data: bytes, draw: random.Random) -> bytes:
    whole = zlib.compress(json.dumps(header_of(data), separators=(",", ":")).encode())
    return with_compressed(data, draw.choice((_bytes, _cut, _extended))(whole, draw))


def _form(data: bytes, draw: random.Random) -> bytes:
    """Write the same content in a different form: spaces, key order, or a padding bit after a field."""
    header = header_of(data)
    place, padding = len(data), []
    for entry in reversed(header["fields"]):
        padding += range(place - -entry[3] % 8, place)
        place -= entry[3] + -entry[3] % 8
    if padding and draw.random() < 0.5:
        changed = bytearray(data)
        changed[draw.choice(padding)] = 1
        return bytes(changed)
    keys = draw.sample(list(header), len(header))
    shuffled = draw.random() < 0.5
    return with_text(data, json.dumps({k: header[k] for k in keys} if shuffled else header).encode())


def _field(data: bytes, draw: random.Random) -> bytes:
    """Change the bytes of a field, with a correct checksum."""
    header, body = header_of(data), bytearray(data)
    place = draw.randrange(len(header["fields"]))
    sizes = [entry[3] for entry in header["fields"]]
    start = len(data) - sum(size + -size % 8 for size in sizes[place:])
    part = body[start : start + sizes[place]]
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(part) or 1)
        part[at : at + 4] = draw.choice((b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\0\0\x80\xff", draw.randbytes(4)))
    part = part[: sizes[place]]
    body[start : start + sizes[place]] = part
    header["fields"][place][4] = xxhash.xxh3_64_hexdigest(bytes(part))
    return with_text(bytes(body), json.dumps(header, separators=(",", ":")).encode())


_MESSAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_bytes, _cut, _extended, _header_shape, _header_text, _header_stream, _form),
    *(_header_value, _header_value, _field, _field),  # twice, because these mutations get furthest
)
