"""Check every record of a site's reply before anything is sent.

The bundle's author also controls the reply. So the guard extracts the upload's bytes and puts them
into its own reply. It sends nothing else that the bundle produced.

| in the bundle's reply | result |
|---|---|
| the record "fedveil", cut into slices as in `fedveil.wire.chunking` | the policy limits its bytes |
| any other array, metric or config record | the reply is withheld; the site's audit log lists names and bytes |
| an array with a different dtype, shape or kind, or slices of different sizes | the reply is withheld, as above |
| message type, group, time to live | not sent; the guard's reply has its own values |
| an error's reason | sent as printable text of at most 500 characters |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedveil.errors import PolicyError
from fedveil.sanitize import sanitize
from fedveil.wire import chunking

_UPLOAD = "fedveil"
_REASON = 500  # characters
_CODES = range(9)  # Flower's ErrorCode
_RAISED = 2
_ITEM = 8  # bytes per number, in records that are counted only to be refused


def list_records(content: RecordDict) -> list[list[str | int]]:
    """Return every record as [name, type, bytes], counting names and keys. Names: at most 80 printable characters."""
    return [
        [sanitize(name, 80), type(record).__name__, _bytes(name) + _size(record)] for name, record in content.items()
    ]


def upload_slices(content: RecordDict) -> list[bytes]:
    """Return the slices of a reply that contains only the upload. Raises PolicyError, without quoting the content."""
    if set(content) != {_UPLOAD} or _UPLOAD not in content.array_records:
        raise PolicyError(
            f"reply: it must contain the record {_UPLOAD} and no other, but has {len(content)} records or another "
            "name; the site's audit log names them"
        )
    record = content.array_records[_UPLOAD]
    if not record or sorted(record) != [chunking.slice_key(i) for i in range(len(record))]:
        raise PolicyError("reply: its slices must be named 0, 1, 2, ...; send it as fedveil.wire.chunking does")
    parts = [record[name].data for name in sorted(record)]
    whole = all(len(part) == chunking.SLICE_BYTES for part in parts[:-1]) and 0 < len(parts[-1]) <= chunking.SLICE_BYTES
    plain = all(
        (array.dtype, tuple(array.shape), array.stype) == ("uint8", (len(array.data),), chunking.STYPE)
        for array in record.values()
    )
    if not whole or not plain:
        raise PolicyError(
            f"reply: its slices must be uint8 and have {chunking.SLICE_BYTES} bytes each, except the last; "
            "send it as fedveil.wire.chunking does"
        )
    return parts


def check_upload_reply(
    parts: Iterable[bytes], head: str, to: Message, signature: Mapping[str, str | int] | None = None
) -> Message:
    """Build a reply to the message `to` with an upload, the anchor of this site's log, an optional signature, and
    nothing else.
    """
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in enumerate(parts)}
    content = RecordDict({_UPLOAD: ArrayRecord(arrays), "log": ConfigRecord({"head": head})})
    if signature is not None:
        content["signature"] = ConfigRecord(dict(signature))
    return Message(content, reply_to=to)


def check_error_reply(error: Error, to: Message) -> Message:
    """Build a reply to the message `to` that explains why there is no upload."""
    code = error.code if error.code in _CODES else _RAISED
    return Message(Error(code, sanitize(error.reason or "", _REASON)), reply_to=to)


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    if isinstance(record, ArrayRecord):
        return sum(
            _bytes(key) + len(array.data) + _bytes(array.dtype) + _bytes(array.stype) + _ITEM * len(array.shape)
            for key, array in record.items()
        )
    return sum(_bytes(key) + _bytes(value) for key, value in record.items())


def _bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_bytes, value))
    return len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else _ITEM
