"""Check the bytes of an object that a site sends against the site's announcement.

    TYPE ids length\\0body          ids: the children's, separated by commas; length: the body's

Flower checks an object's hash and that its type is a Flower type. The ServerApp then trusts the object rather than the
announcement: without this check, an object of an unexpected type ended a run, and an Array that named one slice 2,400
times grew to 3.1 GB.

Formal guarantees, for an object that `check_object` lets pass:
- its id is the SHA-256 of its bytes, and its type and children match its place in the announced tree;
- a Message holds the announced metadata and error, and nothing else;
- an Array is one slice of bytes, and no object names a child twice, so a decoded reply is no larger than the upload.

| object | result |
|---|---|
| children in a different order than announced | the same object: Flower's database sorts them |
| a header with a sign, a leading zero or a length that differs from the body's length | refused |
| an ArrayRecord with names other than slice 0, 1, 2, ... | refused |
| an ArrayRecord that names two equal slices | admitted; the maximum reply size limits their number |
| JSON with a duplicate key or thousands of nested levels | refused; no key takes precedence |
| a ConfigRecord that Flower's own reader cannot read | refused |
"""

from __future__ import annotations

import hashlib

from flwr.app import ConfigRecord
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from google.protobuf.message import DecodeError

from fedveil.guard.fleet.announcement import Announcement
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.wire import flower_objects
from fedveil.wire.flower_objects import FlowerObject, ObjectFault, ObjectFormError, ObjectType

_REASONS = {
    ObjectFault.HEAD: RefusalReason.HEAD,
    ObjectFault.TYPE: RefusalReason.OBJECT_TYPE,
    ObjectFault.CHILDREN: RefusalReason.CHILDREN,
    ObjectFault.BODY_SIZE: RefusalReason.BODY_SIZE,
    ObjectFault.BODY: RefusalReason.BODY,
}


def check_object(announcement: Announcement, object_id: str, content: bytes) -> int:
    """Return the size of an object's body in bytes. Raises FleetCallRefused unless the object is as announced."""
    announced = announcement.tree.objects.get(object_id)
    if announced is None:
        raise FleetCallRefused(RefusalReason.NOT_ANNOUNCED, object_id)
    if hashlib.sha256(content).hexdigest() != object_id:
        raise FleetCallRefused(RefusalReason.HASH, object_id)
    slices = flower_objects.max_slices(announcement.max_bytes)
    try:
        read = flower_objects.parse_object(content, announced.type, slices)
        if set(read.children) != announced.children:
            raise FleetCallRefused(RefusalReason.CHILDREN)
        _check_body(announcement, read, content, slices)
    except ObjectFormError as error:
        raise FleetCallRefused(_REASONS[error.fault], error.value) from None
    return len(read.body)


def _check_body(announcement: Announcement, read: FlowerObject, content: bytes, slices: int) -> None:
    match read.type:
        case ObjectType.MESSAGE:
            _check_root(bytes(read.body), announcement.root_body)
        case ObjectType.RECORD_DICT:
            flower_objects.read_record_dict(read)
        case ObjectType.ARRAY_RECORD:
            flower_objects.read_array_record(read, slices)
        case ObjectType.ARRAY:
            flower_objects.read_array(read)
        case ObjectType.CONFIG_RECORD:
            _check_config_record(content, bytes(read.body))
        case ObjectType.ARRAY_CHUNK:
            pass  # any bytes are allowed: the ServerApp checks them


def _check_root(body: bytes, expected: ProtoMessage) -> None:
    try:
        message = ProtoMessage.FromString(body)
    except DecodeError:
        raise FleetCallRefused(RefusalReason.ROOT) from None
    # The length reveals what comparing the fields cannot: duplicate and unknown fields.
    if message != expected or len(body) != expected.ByteSize():
        raise FleetCallRefused(RefusalReason.ROOT)


def _check_config_record(content: bytes, body: bytes) -> None:
    try:
        names = [item.key for item in ProtoConfigRecord.FromString(body).items]
        ConfigRecord.inflate(content)
    except Exception:  # a parser on untrusted bytes; it would raise the same error in the ServerApp
        raise FleetCallRefused(RefusalReason.BODY, "ConfigRecord") from None
    if len(set(names)) != len(names):
        raise FleetCallRefused(RefusalReason.BODY, "ConfigRecord")
