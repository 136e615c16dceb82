"""Digests of signed content: a message's bytes, and a record of settings.

    content = SHA-256 of the message's bytes, slice by slice: nothing is parsed before a signature is verified
    record  = SHA-256("fedveil record 1\\n" + canonical JSON of {key: [tag, text]})

| value of a record | tag | text |
|---|---|---|
| bool | b | 0 or 1 |
| int | i | decimal |
| float | f | float.hex() |
| str | s | unchanged |
| bytes | y | hexadecimal digits |
| list | [ and the tag of its items; only [ for an empty list | a list of the items' texts |

Without tags, 1.5 and the text "0x1.8p+0" would have the same digest, as would the bytes ab and the text "ab".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedveil.errors import WireError

if TYPE_CHECKING:
    from fedveil.contract.codec import Buffer

_RECORD = b"fedveil record 1\n"


def digest_record(record: Mapping[str, Any]) -> str:
    """Return the digest of a flat record, 64 hex digits. Raises WireError for a value of any other type."""
    try:
        tagged = {str(key): _tagged(value) for key, value in record.items()}
        text = json.dumps(tagged, sort_keys=True, separators=(",", ":")).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise WireError(f"record: it contains text that UTF-8 cannot encode ({type(error).__name__})") from None
    return hashlib.sha256(_RECORD + text).hexdigest()


def digest_content(slices: Iterable[Buffer]) -> str:
    """Return the digest of a sliced message, 64 hex digits. Where the message was sliced does not matter."""
    hasher = hashlib.sha256()
    for part in slices:
        hasher.update(part)
    return hasher.hexdigest()


def _tagged(value: Any) -> list[Any]:
    if type(value) is list:
        items = [_tagged(item) for item in value]
        if len({tag for tag, _ in items}) > 1 or any(isinstance(text, list) for _, text in items):
            raise WireError("record: a list has values of mixed types; it may have only one")
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
