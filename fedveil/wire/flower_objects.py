"""The objects of a reply as Flower sends and stores them, restricted to the form that FedVeil's sites produce.

    TYPE ids length\\0body          ids: the children's, comma-separated; length: the body's

    Message -- RecordDict -- ArrayRecord -- Array -- ArrayChunk      (a slice of the upload; many)
                          -- ConfigRecord                            (the head of the site's log)

The fleet port uses these functions to check a reply before Flower sees it (fedveil/guard/fleet), and the ServerApp uses
them to read it (fedveil/server_app/object_reader.py). Those modules parse the two protobuf bodies, of a Message and of
a ConfigRecord, because this module imports neither Flower nor torch.

Formal guarantees, for an object that `parse_object` returns:
- its type is the expected type, its children are distinct ids, and its body is no larger than its type allows.

| object | result |
|---|---|
| a head with a length that has a sign or a leading zero, or differs from the body's | refused |
| JSON with a duplicate key, or nested thousands of levels deep | refused; no key overrides another |
| an ArrayRecord with names other than slice 0, 1, 2, ... in this order | refused |
| an ArrayRecord that names two equal slices | read; their number is bounded by the largest reply |
| an Array that names its chunk twice, or a wrong number of bytes | refused: the result is no larger than the input |
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedveil.errors import WireError
from fedveil.wire import chunking

MAX_ARRAY_BODY_BYTES = 512  # 60 kB of "[" end Python's JSON reader with a RecursionError
MAX_BODY_BYTES = 64 << 10
BODY_BYTES_OF_A_SLICE = 160  # an ArrayRecord has 65 head bytes and 78 body bytes per slice
_MAX_NAME = 80  # maximum number of characters in a record's name
_ID = re.compile(r"[0-9a-f]{64}")
_HEAD = re.compile(rb"([A-Za-z]{1,40}) ([0-9a-f,]*) (0|[1-9][0-9]{0,9})")


class ObjectType(Enum):
    """A Flower class, by the name in the head of its objects."""

    MESSAGE = "Message"
    RECORD_DICT = "RecordDict"
    ARRAY_RECORD = "ArrayRecord"
    CONFIG_RECORD = "ConfigRecord"
    ARRAY = "Array"
    ARRAY_CHUNK = "ArrayChunk"


class ObjectFault(Enum):
    """The malformed part of an object."""

    HEAD = "head"
    TYPE = "type"
    CHILDREN = "children"
    BODY_SIZE = "size"
    BODY = "body"


class ObjectFormError(WireError):
    """Raised for a malformed object. `value` is the wrong value, for logs only."""

    def __init__(self, fault: ObjectFault, expected: ObjectType, value: str = "") -> None:
        super().__init__(f"reply: an object of type {expected.value} has the wrong {fault.value}")
        self.fault, self.value = fault, value


@dataclass(frozen=True)
class FlowerObject:
    """An object whose head has been checked.

    Attributes:
        children: distinct ids, in the head's order.
        body: a view of the object's bytes.
    """

    type: ObjectType
    children: tuple[str, ...]
    body: memoryview

    def fault(self, fault: ObjectFault, value: str = "") -> ObjectFormError:
        """Return the error that names a part of this object."""
        return ObjectFormError(fault, self.type, value)


def is_object_id(text: str) -> bool:
    """Return whether a text can be an object's id, the SHA-256 of its bytes."""
    return _ID.fullmatch(text) is not None


def max_slices(max_bytes: int) -> int:
    """Return the maximum number of slices in a message of at most `max_bytes`."""
    return -(-max_bytes // chunking.SLICE_BYTES)


def parse_object(content: bytes, expected: ObjectType, slices: int) -> FlowerObject:
    """Parse `content`, an object in a reply with at most `slices` slices. Raises ObjectFormError."""
    end = content.find(b"\0")
    head, body = content[: max(end, 0)], memoryview(content)[end + 1 :]
    parts = _HEAD.fullmatch(head)
    if end < 0 or parts is None or int(parts[3]) != len(body):
        raise ObjectFormError(ObjectFault.HEAD, expected, head[:80].decode("latin-1"))
    if (name := parts[1].decode()) != expected.value:
        raise ObjectFormError(ObjectFault.TYPE, expected, f"{name} for {expected.value}")
    children = tuple(parts[2].decode().split(",")) if parts[2] else ()
    if len(set(children)) != len(children) or not all(map(is_object_id, children)):
        raise ObjectFormError(ObjectFault.CHILDREN, expected)
    if len(body) > _max_body_bytes(expected, slices):
        raise ObjectFormError(ObjectFault.BODY_SIZE, expected, f"{expected.value} of {len(body)} bytes")
    return FlowerObject(expected, children, body)


def read_record_dict(record_dict: FlowerObject) -> dict[str, str]:
    """Return the records' ids by name. Raises ObjectFormError unless each child has one name."""
    records = _json_object(record_dict)
    is_right = all(0 < len(name) <= _MAX_NAME for name in records)
    if not is_right or sorted(map(str, records.values())) != sorted(record_dict.children):
        raise record_dict.fault(ObjectFault.BODY, "RecordDict")
    return {name: str(id_) for name, id_ in records.items()}


def read_array_record(array_record: FlowerObject, slices: int) -> list[str]:
    """Return the id of each slice's Array, in order. Raises ObjectFormError if malformed or with more slices."""
    arrays = _json_object(array_record)
    names, ids = list(arrays), list(map(str, arrays.values()))
    is_right = 0 < len(names) <= slices and names == [chunking.slice_key(index) for index in range(len(names))]
    if not is_right or set(ids) != set(array_record.children):
        raise array_record.fault(ObjectFault.BODY, "ArrayRecord")
    return ids


def read_array(array: FlowerObject) -> int:
    """Return the number of bytes in an Array's only slice. Raises ObjectFormError for any other Array."""
    entries = _json_object(array)
    shape = entries.pop("shape", None)
    is_slice = entries == {"dtype": "uint8", "stype": chunking.STYPE, "arraychunk_ids": [0]}
    is_zero = is_slice and type(entries["arraychunk_ids"][0]) is int  # False and 0.0 also equal 0
    if not (is_zero and isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int):
        raise array.fault(ObjectFault.BODY, "Array")
    if not 0 < shape[0] <= chunking.SLICE_BYTES:
        raise array.fault(ObjectFault.BODY, "Array")
    return int(shape[0])


def _max_body_bytes(object_type: ObjectType, slices: int) -> int:
    match object_type:
        case ObjectType.ARRAY:
            return MAX_ARRAY_BODY_BYTES
        case ObjectType.ARRAY_CHUNK:
            return chunking.SLICE_BYTES
        case ObjectType.ARRAY_RECORD:
            return MAX_BODY_BYTES + BODY_BYTES_OF_A_SLICE * slices
        case _:
            return MAX_BODY_BYTES


def _json_object(of: FlowerObject) -> dict[str, Any]:
    try:
        value = json.loads(bytes(of.body).decode("ascii"), object_pairs_hook=_distinct_keys)
    except (ValueError, RecursionError):
        raise of.fault(ObjectFault.BODY, "not JSON") from None
    if not isinstance(value, dict):
        raise of.fault(ObjectFault.BODY, "not a JSON object")
    return value


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a duplicate key")
    return dict(pairs)
