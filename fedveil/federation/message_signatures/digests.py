"""Digests of what a signature covers: the bytes of a message, and a record of settings.

    content = SHA-256 over the message's header in canonical form and everything behind it (fedveil.wire.header)
    record  = SHA-256("fedveil record 1\\n" + canonical JSON of {key: [tag, text]})

| value of a record | tag | text |
|---|---|---|
| bool | b | 0 or 1 |
| int | i | decimal |
| float | f | float.hex() |
| str | s | as it is |
| bytes | y | hexadecimal digits |
| list | [ and the tag of its items; [ alone for an empty one | a list of the items' texts |

Without tags 1.5 and the text "0x1.8p+0" would have one digest, and so would the bytes ab and the text "ab".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedveil.errors import WireError
from fedveil.wire import header

_RECORD = b"fedveil record 1\n"
_ALIGNMENT = 8  # bytes; header and fields are padded to it


def digest_record(record: Mapping[str, Any]) -> str:
    """Return the digest of a flat record, 64 hex digits. Raises WireError for a value that no such record has."""
    try:
        tagged = {str(key): _tagged(value) for key, value in record.items()}
        text = json.dumps(tagged, sort_keys=True, separators=(",", ":")).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise WireError(f"record: expected texts of whole characters, found others ({type(error).__name__})") from None
    return hashlib.sha256(_RECORD + text).hexdigest()


def digest_content(slices: Iterable[bytes]) -> str:
    """Return the digest of a message in slices, 64 hex digits: `header.message_digest` of the whole message.

    Holds no more than its header and one slice. Raises WireError if it has no header.
    """
    parts, head = iter(slices), bytearray()
    for part in parts:
        head += part
        if len(head) >= header.PREFIX + int.from_bytes(head[4:8], "little") + _ALIGNMENT:
            break
    with memoryview(head) as whole:
        content, start = header.read_header(whole)
        hasher = hashlib.sha256(header.write_header(content))
        hasher.update(whole[start:])
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _tagged(value: Any) -> list[Any]:
    if type(value) is list:
        items = [_tagged(item) for item in value]
        if len({tag for tag, _ in items}) > 1 or any(isinstance(text, list) for _, text in items):
            raise WireError("record: expected lists of values of one type, found another list")
        return ["[" + (items[0][0] if items else ""), [text for _, text in items]]
    match value:
        case bool():
            return ["b", str(int(value))]
        case int():
            return ["i", str(value)]
        case float():
            return ["f", value.hex()]
        case str():
            value.encode()
            return ["s", value]
        case bytes():
            return ["y", value.hex()]
    raise WireError(f"record: expected numbers, texts and bytes, found {type(value).__name__}")
