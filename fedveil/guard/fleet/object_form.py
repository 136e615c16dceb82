"""The bytes of an object that a site sends, compared with what it announced.

    TYPE ids length\\0body          ids: of the children, with commas; length: of the body

Flower checks an object's hash and that its type is one of its own. The ServerApp then believes the object, not what was
announced with it: an object of another type ended a run, and an Array that named one slice 2,400 times became 3.1 GB.

Formal guarantees, for an object that `check_object` lets pass:
- its id is the SHA-256 of its bytes, its type and children are those of its place in the tree;
- a Message holds the announced metadata and error, and nothing else;
- an Array is one slice of bytes, and no object names a child twice: what comes out of a reply is at most what went in.

| object | result |
|---|---|
| children in another order than announced | the same object: Flower's database sorts them |
| a head with a sign, a zero in front or another length than the body's | refused |
| an ArrayRecord with other names than slice 0, 1, 2, ... | refused |
| an ArrayRecord that names two equal slices | admitted; their number is bounded by the largest reply |
| JSON with a key twice, or nested by thousands | refused; no key wins over another |
| a ConfigRecord that Flower's own reader does not read | refused |
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from flwr.app import ConfigRecord
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from google.protobuf.message import DecodeError

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announced_tree import AnnouncedObject, ObjectType, is_object_id
from fedveil.guard.fleet.announcement import Announcement
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.wire import chunking

_HEAD = re.compile(rb"([A-Za-z]{1,40}) ([0-9a-f,]*) (0|[1-9][0-9]{0,9})")


def check_object(announcement: Announcement, object_id: str, content: bytes) -> int:
    """Return the bytes of an object's body. Raises FleetCallRefused unless the object is the announced one."""
    announced = announcement.tree.objects.get(object_id)
    if announced is None:
        raise FleetCallRefused(RefusalReason.NOT_ANNOUNCED, object_id)
    if hashlib.sha256(content).hexdigest() != object_id:
        raise FleetCallRefused(RefusalReason.HASH, object_id)
    children, body = _split_object(announced, content)
    slices = -(-announcement.max_bytes // limits.MAX_CHUNK_BYTES)
    if len(body) > _max_body_bytes(announced.type, slices):
        raise FleetCallRefused(RefusalReason.BODY_SIZE, f"{announced.type.value} of {len(body)} bytes")
    match announced.type:
        case ObjectType.MESSAGE:
            _check_root(body, announcement.root_body)
        case ObjectType.RECORD_DICT:
            _check_record_dict(body, children)
        case ObjectType.ARRAY_RECORD:
            _check_array_record(body, children, slices)
        case ObjectType.ARRAY:
            _check_array(body)
        case ObjectType.CONFIG_RECORD:
            _check_config_record(content, body)
        case ObjectType.ARRAY_CHUNK:
            pass  # any bytes: the ServerApp's own checks read them
    return len(body)


def _max_body_bytes(object_type: ObjectType, slices: int) -> int:
    match object_type:
        case ObjectType.ARRAY:
            return limits.MAX_ARRAY_BODY_BYTES
        case ObjectType.ARRAY_CHUNK:
            return limits.MAX_CHUNK_BYTES
        case ObjectType.ARRAY_RECORD:
            return limits.MAX_BODY_BYTES + limits.BODY_BYTES_OF_A_SLICE * slices
        case _:
            return limits.MAX_BODY_BYTES


def _split_object(announced: AnnouncedObject, content: bytes) -> tuple[list[str], bytes]:
    """Return the children in the object's own order, and its body."""
    head, _, body = content.partition(b"\0")
    parts = _HEAD.fullmatch(head)
    if parts is None or int(parts[3]) != len(body):
        raise FleetCallRefused(RefusalReason.HEAD, head[:80].decode("latin-1"))
    if parts[1].decode() != announced.type.value:
        raise FleetCallRefused(RefusalReason.OBJECT_TYPE, f"{parts[1].decode()} for {announced.type.value}")
    children = parts[2].decode().split(",") if parts[2] else []
    if len(children) != len(announced.children) or set(children) != announced.children:
        raise FleetCallRefused(RefusalReason.CHILDREN)
    return children, body


def _check_root(body: bytes, expected: ProtoMessage) -> None:
    try:
        message = ProtoMessage.FromString(body)
    except DecodeError:
        raise FleetCallRefused(RefusalReason.ROOT) from None
    # The length finds what the comparison of the fields cannot: a field that stands twice, and unknown ones.
    if message != expected or len(body) != expected.ByteSize():
        raise FleetCallRefused(RefusalReason.ROOT)


def _check_record_dict(body: bytes, children: list[str]) -> None:
    records = _json_object(body)
    if not all(0 < len(name) <= 80 for name in records) or sorted(map(str, records.values())) != sorted(children):
        raise FleetCallRefused(RefusalReason.BODY, "RecordDict")


def _check_array_record(body: bytes, children: list[str], max_slices: int) -> None:
    slices = _json_object(body)
    names = [chunking.slice_key(index) for index in range(len(slices))]
    values = list(slices.values())
    is_right = len(slices) <= max_slices and sorted(slices) == names and all(is_object_id(str(v)) for v in values)
    if not is_right or {str(value) for value in values} != set(children):
        raise FleetCallRefused(RefusalReason.BODY, "ArrayRecord")


def _check_array(body: bytes) -> None:
    array = _json_object(body)
    shape = array.pop("shape", None)
    is_slice = array == {"dtype": "uint8", "stype": chunking.STYPE, "arraychunk_ids": [0]}
    is_zero = is_slice and type(array["arraychunk_ids"][0]) is int  # False and 0.0 are equal to it
    if not (is_zero and isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int):
        raise FleetCallRefused(RefusalReason.BODY, "Array")
    if not 0 < shape[0] <= limits.MAX_CHUNK_BYTES:
        raise FleetCallRefused(RefusalReason.BODY, "Array")


def _check_config_record(content: bytes, body: bytes) -> None:
    try:
        names = [item.key for item in ProtoConfigRecord.FromString(body).items]
        ConfigRecord.inflate(content)
    except Exception:  # a parser on foreign bytes: whatever it raises here it would raise in the ServerApp
        raise FleetCallRefused(RefusalReason.BODY, "ConfigRecord") from None
    if len(set(names)) != len(names):
        raise FleetCallRefused(RefusalReason.BODY, "ConfigRecord")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("ascii"), object_pairs_hook=_distinct_keys)
    except (ValueError, RecursionError):
        raise FleetCallRefused(RefusalReason.BODY, "no JSON") from None
    if not isinstance(value, dict):
        raise FleetCallRefused(RefusalReason.BODY, "no JSON object")
    return value


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)
