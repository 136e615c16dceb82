"""Replies as FedVeil's sites make them, with Flower's own classes, and what a hostile site would change in them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute

from fedveil.guard.fleet.announcement import Announcement, read_announcement
from fedveil.guard.flower.link_states import InstructionRow
from fedveil.wire import chunking

RUN, NODE, OTHER = 77, 4979176014801009989, 5
# It outlasts the slowest run of all tests, of which this module is loaded at the beginning.
INSTRUCTION = InstructionRow("ab" * 32, RUN, NODE, "train", "3/4000000", time.time(), 36_000.0, "")


@dataclass
class Reply:
    """The call that announces a reply, and its objects."""

    request: PushMessagesRequest
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return self.request.message_object_trees[0].object_id

    def of_type(self, name: str) -> str:
        """The id of the first object of this type."""
        return next(id_ for id_, content in self.objects.items() if content.startswith(name.encode() + b" "))

    def announcement(self, instruction: InstructionRow | None = INSTRUCTION) -> Announcement:
        return read_announcement(self.request, instruction, time.time(), NODE)


def upload(*slices: bytes) -> RecordDict:
    """The content of a reply, as the guard of a site makes it."""
    arrays = {
        chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in enumerate(slices)
    }
    return RecordDict({"fedveil": ArrayRecord(arrays), "log": ConfigRecord({"head": "1:" + "0" * 64})})


def metadata(instruction: InstructionRow = INSTRUCTION, node: int = NODE, ago: float = 0.0) -> Metadata:
    """Of a reply to the instruction, by a clock that is `ago` seconds behind."""
    made = time.time() - ago
    return Metadata(
        instruction.run_id, "", node, 1, instruction.message_id, instruction.group_id, made, instruction.expires - made,
        instruction.message_type, src_task_id=11, dst_task_id=12,
    )  # fmt: skip


def make_reply(content: RecordDict | Error | None = None, about: Metadata | None = None) -> Reply:
    """A whole reply; without content the upload of two slices."""
    content = content or upload(b"a" * 1000, b"b" * 500)
    kind = {"error": content} if isinstance(content, Error) else {"content": content}
    message = Message(metadata=about or metadata(), **kind)
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        tree = get_object_tree(message)
        objects = {id_: part.deflate() for id_, part in get_all_nested_objects(message).items()}
    bare = message_to_proto(remove_content_from_message(message))
    node = Node(node_id=message.metadata.src_node_id)
    request = PushMessagesRequest(
        node=node, messages_list=[bare], message_object_trees=[tree], clientapp_runtime_list=[1.5]
    )
    return Reply(request, objects)


def object_bytes(type_: str, children: list[str], body: bytes) -> bytes:
    """An object with a right head."""
    return f"{type_} {','.join(children)} {len(body)}".encode() + b"\0" + body


def object_id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def split(content: bytes) -> tuple[str, list[str], bytes]:
    """Type, children and body of an object."""
    head, _, body = content.partition(b"\0")
    type_, children, _ = head.decode().split(" ")
    return type_, children.split(",") if children else [], body


def exchange_object(reply: Reply, old: str, new: bytes) -> Reply:
    """The reply with another object in one's place: all above it name the new one, up to the root."""
    tree, objects = ObjectTree(), dict(reply.objects)
    tree.CopyFrom(reply.request.message_object_trees[0])
    renamed = {old: object_id(new)}
    del objects[old]
    objects[renamed[old]] = new

    def rebuilt(node: ObjectTree) -> ObjectTree:
        if node.object_id == old:
            children = [child for child in node.children if child.object_id in split(new)[1]]
            return ObjectTree(object_id=renamed[old], children=children)
        children = [rebuilt(child) for child in node.children]
        if any(child.object_id != before.object_id for child, before in zip(children, node.children, strict=True)):
            type_, ids, body = split(objects.pop(node.object_id))
            for before, after in renamed.items():
                ids = [after if id_ == before else id_ for id_ in ids]
                body = body.replace(before.encode(), after.encode())
            content = object_bytes(type_, ids, body)
            renamed[node.object_id] = object_id(content)
            objects[renamed[node.object_id]] = content
        return ObjectTree(object_id=renamed.get(node.object_id, node.object_id), children=children)

    new_tree = rebuilt(tree)
    request = PushMessagesRequest()
    request.CopyFrom(reply.request)
    request.message_object_trees[0].CopyFrom(new_tree)
    request.messages_list[0].metadata.message_id = new_tree.object_id
    return Reply(request, objects)


def json_body(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode()


def instruction(**more: object) -> InstructionRow:
    return replace(INSTRUCTION, **more)  # type: ignore[arg-type]
