"""Read one reply's objects strictly, from its root down, using only the objects' own headers.

Flower's own reader trusts the objects instead of the announcement that the SuperLink checked: an object of an
unexpected type ends a run, and an Array that names one slice 2,400 times grows to 3.1 GB. Here each object is hashed
before it is parsed, and must have the form that FedVeil's sites create (fedveil/wire/flower_objects.py). The object
tree sent by the SuperLink is not used.

Formal guarantees, for a reply of at most `max_bytes`:
- memory: the upload itself, and one slice for each of two threads;
- the upload consists of the bytes whose SHA-256 hashes name its slices, in order, including repeated slices;
- an object that is not part of the upload is not pulled.

| reply | result |
|---|---|
| metadata that differs from the announcement | WireError naming the field |
| a root that is not a Message or cannot be parsed | WireError |
| a record other than "fedveil", "log" and "signature" | WireError naming the records |
| more bytes than `max_bytes`, including repeats | WireError, before a slice is pulled |
| a short slice that is not the last | WireError |
| an object that has not been pushed yet | IncompleteReplyError |
| an object that the SuperLink no longer has | LostObjectError |
| a log record without an audit-log head | the upload, with "" as the head |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import Any, final

from flwr.app import ConfigRecord
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import ConfigRecord as ProtoConfigRecord
from google.protobuf.message import DecodeError

from fedveil.errors import WireError
from fedveil.server_app.reply_content import ReplyContent, ReplyError, parse_log_head, require_records
from fedveil.wire import chunking, flower_objects, mmap_tensors
from fedveil.wire.flower_objects import FlowerObject, ObjectFault, ObjectType

_PULLS_AT_ONCE = 2
_ANNOUNCED = ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "message_type")


class IncompleteReplyError(WireError):
    """Raised for a reply object that was announced but has not been pushed yet."""


class LostObjectError(WireError):
    """Raised for a reply object that the SuperLink no longer has."""


@final
class ObjectReader:
    """Reads one reply.

    Args:
        pull: returns the bytes of an object. Raises IncompleteReplyError, LostObjectError.
        max_bytes: maximum size of the upload.
        folder: folder that stores a long upload until it is processed, or None to keep it in memory.

    Attributes:
        received_bytes: size of the slices read so far, for a reply that is refused.
    """

    def __init__(self, pull: Callable[[str], bytes], max_bytes: int, folder: Path | None) -> None:
        self._pull, self._max_bytes, self._folder = pull, max_bytes, folder
        self._slices = max(flower_objects.max_slices(max_bytes), chunking.MAX_REPLY_SLICES)
        self.received_bytes = 0

    def read_content(self, announced: ProtoMessage) -> ReplyContent | ReplyError:
        """Return the content of a reply. Raises WireError, StateError.

        Args:
            announced: the SuperLink's entry; its message id is the root's id, and its other metadata is checked.
        """
        root, _ = self._object(announced.metadata.message_id, ObjectType.MESSAGE)
        message = _parse_root(root)
        _require_announced(message, announced)
        if message.HasField("error"):
            if root.children:
                raise root.fault(ObjectFault.CHILDREN)
            return ReplyError(message.error.code, message.error.reason)
        if len(root.children) != 1:
            raise root.fault(ObjectFault.CHILDREN)
        record_dict, _ = self._object(root.children[0], ObjectType.RECORD_DICT)
        records = flower_objects.read_record_dict(record_dict)
        require_records(records)
        site_log, signature = "", None
        if "log" in records:
            site_log = parse_log_head(self._read_config(records["log"]).get("head"))
        if "signature" in records:
            signature = self._read_config(records["signature"])
        array_record, _ = self._object(records["fedveil"], ObjectType.ARRAY_RECORD)
        arrays = flower_objects.read_array_record(array_record, self._slices)
        return ReplyContent(self._read_slices(arrays), site_log, signature)

    def _read_config(self, object_id: str) -> dict[str, Any]:
        """Return a config record. Raises ObjectFormError unless it has each key once and nothing unknown."""
        record, content = self._object(object_id, ObjectType.CONFIG_RECORD)
        try:
            parsed = ProtoConfigRecord.FromString(bytes(record.body))
            parsed.DiscardUnknownFields()
            names = {item.key for item in parsed.items}
            if parsed.ByteSize() != len(record.body) or len(names) != len(parsed.items):
                raise record.fault(ObjectFault.BODY)
            return dict(ConfigRecord.inflate(content))
        except WireError:
            raise
        except Exception:  # Flower's parser on untrusted bytes
            raise record.fault(ObjectFault.BODY) from None

    def _object(self, object_id: str, expected: ObjectType) -> tuple[FlowerObject, bytes]:
        """Return an object and its bytes. Raises WireError unless hash, type and form are as expected."""
        if not flower_objects.is_object_id(object_id):
            raise WireError("reply: an object's id is malformed")
        content = self._pull(object_id)
        if hashlib.sha256(content).hexdigest() != object_id:
            raise WireError("reply: an object does not have the hash that names it")
        return flower_objects.parse_object(content, expected, self._slices), content

    def _read_slices(self, arrays: list[str]) -> bytearray | mmap:
        """Return the upload. The last slice determines its length, so an upload that is too long needs no memory."""
        size, chunk = self._read_array(arrays[-1])
        total = (len(arrays) - 1) * chunking.SLICE_BYTES + size
        if total > self._max_bytes:
            raise WireError(f"reply: its {total} bytes exceed the {self._max_bytes} that the run's layout allows")
        whole = mmap_tensors.allocate(self._folder, total) if self._folder else bytearray(total)
        positions: dict[str, list[int]] = {}
        for position, array in enumerate(arrays):
            positions.setdefault(array, []).append(position)
        known = {arrays[-1]: (size, chunk)}

        def read_into(array: str) -> int:
            return self._read_slice(whole, known.get(array) or self._read_array(array), positions[array])

        if len(positions) == 1:
            self.received_bytes = read_into(arrays[-1])
            return whole
        with ThreadPoolExecutor(_PULLS_AT_ONCE, "fedveil-reply") as pool:
            reads = [pool.submit(read_into, array) for array in positions]
            try:
                for read in reads:
                    self.received_bytes += read.result()
            except BaseException:  # also Flower's exception for a stopped run
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return whole

    def _read_array(self, array_id: str) -> tuple[int, str]:
        """Return the number of bytes in a slice, and the id of its chunk."""
        array, _ = self._object(array_id, ObjectType.ARRAY)
        if len(array.children) != 1:
            raise array.fault(ObjectFault.CHILDREN)
        return flower_objects.read_array(array), array.children[0]

    def _read_slice(self, whole: bytearray | mmap, array: tuple[int, str], positions: list[int]) -> int:
        """Write a slice to its positions in the upload. Return the number of bytes written."""
        (size, chunk_id), last = array, -(-len(whole) // chunking.SLICE_BYTES) - 1
        if size != chunking.SLICE_BYTES and positions != [last]:
            raise WireError(f"reply: a slice before the last has {size} bytes instead of {chunking.SLICE_BYTES}")
        chunk, _ = self._object(chunk_id, ObjectType.ARRAY_CHUNK)
        if chunk.children:
            raise chunk.fault(ObjectFault.CHILDREN)
        if len(chunk.body) != size:
            raise chunk.fault(ObjectFault.BODY_SIZE)
        for position in positions:
            start = position * chunking.SLICE_BYTES
            whole[start : start + size] = chunk.body
        return size * len(positions)


def _parse_root(root: FlowerObject) -> ProtoMessage:
    try:
        message: ProtoMessage = ProtoMessage.FromString(bytes(root.body))
    except DecodeError:
        raise root.fault(ObjectFault.BODY) from None
    message.DiscardUnknownFields()
    if message.ByteSize() != len(root.body) or message.HasField("content"):
        raise root.fault(ObjectFault.BODY)
    return message


def _require_announced(message: ProtoMessage, announced: ProtoMessage) -> None:
    """Raise WireError unless a message's site, run and instruction match those that the SuperLink has checked."""
    for name in _ANNOUNCED:
        if getattr(message.metadata, name) != getattr(announced.metadata, name):
            raise WireError(f"reply: the {name} in its object differs from the one that the site announced")
    if message.HasField("error") != announced.HasField("error") or message.error != announced.error:
        raise WireError("reply: the error in its object differs from the one that the site announced")
