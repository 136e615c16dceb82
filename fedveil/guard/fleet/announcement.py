"""Check a site's announced reply against the instruction that it answers.

Flower checks only that a reply's run is running and that the instruction was sent to the node named in the reply. It
does not check the instruction's number, type or times, and treats a message without an instruction as an order to any
site.

Formal guarantees, for an `Announcement` that `read_announcement` returns:
- its source is the site that signed the call, and its instruction was sent to that site;
- its run, type and group are those of the instruction, and the reply does not outlive the instruction;
- its message id is the root of its tree, which has the form and at most the size of a reply (announced_tree.py);
- `request` contains nothing else that the site wrote.

| announced | result |
|---|---|
| two messages, two trees, or none | refused |
| a message without an instruction, or for a destination other than the ServerApp | refused: it is an order |
| a reply to another site's instruction, or to an instruction already answered | refused, with the same message |
| a clock up to 305 s behind or 5 s ahead, as Flower allows | admitted |
| NaN or infinite times | refused |
| a run time that is NaN, negative or above 3e6 s | set to 0, 0 or 3e6: Flower adds it up in a column of the run |
| a reply with an error | a tree with one object, and at most 64 KiB |
| task counts | as announced: Flower's database does not store an instruction's, and nothing uses a reply's |
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announced_tree import AnnouncedTree, max_tree_nodes, read_tree
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.guard.flower.link_states import InstructionRow
from fedveil.wire.flower_objects import is_object_id

_GROUP = re.compile(r"[0-9]{1,9}/([0-9]{1,13})")


@dataclass(frozen=True)
class Announcement:
    """A reply whose objects the site will send next.

    Attributes:
        expires: when the instruction expires, in seconds since 1970.
        max_bytes: the maximum total size of the object bodies.
        root_body: the required body of the root object.
        request: the call that Flower receives once all objects have arrived.
    """

    node_id: int
    run_id: int
    instruction_id: str
    expires: float
    max_bytes: int
    tree: AnnouncedTree
    root_body: ProtoMessage
    request: bytes


def max_reply_bytes(group_id: str) -> int:
    """Return the maximum size of a reply, which the ServerApp puts into an instruction's group as "ROUND/BYTES"."""
    named = _GROUP.fullmatch(group_id)
    return int(named[1]) if named else limits.DEFAULT_REPLY_BYTES


def instruction_id_of(request: PushMessagesRequest) -> str:
    """Return the id of the instruction that a call answers. Raises FleetCallRefused."""
    if (len(request.messages_list), len(request.message_object_trees)) != (1, 1):
        raise FleetCallRefused(RefusalReason.SHAPE)
    if len(request.clientapp_runtime_list) > 1:
        raise FleetCallRefused(RefusalReason.SHAPE)
    instruction_id = request.messages_list[0].metadata.reply_to_message_id
    if not is_object_id(instruction_id):
        raise FleetCallRefused(RefusalReason.FOREIGN_INSTRUCTION, instruction_id)
    return str(instruction_id)


def read_announcement(
    request: PushMessagesRequest, instruction: InstructionRow | None, now: float, node_id: int
) -> Announcement:
    """Return the announced reply. Raises FleetCallRefused.

    Args:
        instruction: the instruction with the id from `instruction_id_of`; None if Flower does not have it.
        now: the current time in seconds since 1970.
        node_id: the site that signed the call.
    """
    message, tree = request.messages_list[0], request.message_object_trees[0]
    about = message.metadata
    if about.src_node_id != node_id or about.dst_node_id != SUPERLINK_NODE_ID:
        raise FleetCallRefused(RefusalReason.SENDER, f"{about.src_node_id} to {about.dst_node_id}")
    if instruction is None or instruction.node_id != node_id:
        raise FleetCallRefused(RefusalReason.FOREIGN_INSTRUCTION, about.reply_to_message_id)
    if instruction.expires <= now:
        raise FleetCallRefused(RefusalReason.ENDED, about.reply_to_message_id)
    if (about.run_id, about.message_type, about.group_id) != (
        instruction.run_id, instruction.message_type, instruction.group_id,
    ):  # fmt: skip
        raise FleetCallRefused(RefusalReason.FIELDS, f"{about.run_id} {about.message_type[:40]} {about.group_id[:40]}")
    if about.message_id != tree.object_id:
        raise FleetCallRefused(RefusalReason.MESSAGE_ID, about.message_id)
    _require_times(about, instruction, now)
    is_error = message.HasField("error")
    if message.HasField("content") == is_error or message.content.ByteSize():
        raise FleetCallRefused(RefusalReason.CONTENT)
    largest = limits.MAX_ERROR_REPLY_BYTES if is_error else max_reply_bytes(instruction.group_id)
    announced = read_tree(tree, max_tree_nodes(largest), is_error)
    root_body = ProtoMessage(metadata=_known_fields(about))
    if is_error:
        root_body.error.SetInParent()  # an error with code 0 and no reason is also an error
        root_body.error.code, root_body.error.reason = message.error.code, message.error.reason
    return Announcement(
        node_id, instruction.run_id, instruction.message_id, instruction.expires, largest + limits.EXTRA_REPLY_BYTES,
        announced, root_body, _flower_request(request, root_body),
    )  # fmt: skip


def _require_times(about: ProtoMetadata, instruction: InstructionRow, now: float) -> None:
    earliest, latest = instruction.created_at - limits.MAX_CLOCK_SECONDS, now + limits.MAX_CLOCK_SECONDS
    is_now = math.isfinite(about.created_at) and earliest <= about.created_at <= latest
    end = instruction.expires + limits.TTL_TOLERANCE_SECONDS
    if not (is_now and math.isfinite(about.ttl) and 0 < about.ttl <= end - about.created_at):
        raise FleetCallRefused(RefusalReason.TIMES, f"{about.created_at} + {about.ttl}")


def _known_fields(about: ProtoMetadata) -> ProtoMetadata:
    """Return the metadata of a root object without the message id, which is the hash of the object."""
    fields = ProtoMetadata(
        run_id=about.run_id, src_node_id=about.src_node_id, dst_node_id=about.dst_node_id,
        reply_to_message_id=about.reply_to_message_id, group_id=about.group_id, ttl=about.ttl,
        message_type=about.message_type, created_at=about.created_at,
    )  # fmt: skip
    if about.HasField("src_task_id"):
        fields.src_task_id = about.src_task_id
    if about.HasField("dst_task_id"):
        fields.dst_task_id = about.dst_task_id
    return fields


def _flower_request(request: PushMessagesRequest, root_body: ProtoMessage) -> bytes:
    """Return the call with only the fields that were checked."""
    about = ProtoMetadata()
    about.CopyFrom(root_body.metadata)
    about.message_id = request.message_object_trees[0].object_id
    message = ProtoMessage(metadata=about)
    if root_body.HasField("error"):
        message.error.CopyFrom(root_body.error)
    else:
        message.content.SetInParent()
    judged = PushMessagesRequest(
        node=request.node, messages_list=[message], message_object_trees=[request.message_object_trees[0]]
    )
    for seconds in request.clientapp_runtime_list:
        is_number = not math.isnan(seconds)
        judged.clientapp_runtime_list.append(min(max(seconds, 0.0), limits.MAX_RUNTIME_SECONDS) if is_number else 0.0)
    return bytes(judged.SerializeToString())
