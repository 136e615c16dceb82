"""Announced replies that a hostile site forges, field by field, and those that an honest one sends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Error
from flwr.proto.fleet_pb2 import PushMessagesRequest

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announcement import instruction_id_of, max_reply_bytes, read_announcement
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from tests.fedveil.guard.fleet.replies import INSTRUCTION, NODE, OTHER, RUN, instruction, make_reply, metadata


def refused(**change: Any) -> RefusalReason:
    """Why a reply is refused whose fields are changed so."""
    reply = make_reply()
    for name, value in change.items():
        setattr(reply.request.messages_list[0].metadata, name, value)
    with pytest.raises(FleetCallRefused) as why:
        reply.announcement()
    return why.value.reason


def test_an_honest_reply_is_announced_as_it_is() -> None:
    reply = make_reply()
    announced = reply.announcement()
    assert instruction_id_of(reply.request) == INSTRUCTION.message_id == announced.instruction_id
    assert set(announced.tree.objects) == set(reply.objects)
    assert (announced.node_id, announced.run_id, announced.tree.root) == (NODE, RUN, reply.root)
    assert PushMessagesRequest.FromString(announced.request) == reply.request
    assert announced.max_bytes == 4_000_000 + limits.EXTRA_REPLY_BYTES


@pytest.mark.parametrize("ago", [304.0, -4.0])
def test_a_clock_that_flower_admits_is_admitted(ago: float) -> None:
    make_reply(about=metadata(ago=ago)).announcement()


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"src_node_id": OTHER}, RefusalReason.SENDER),
        ({"src_node_id": 1}, RefusalReason.SENDER),
        ({"src_node_id": 1, "reply_to_message_id": ""}, RefusalReason.SENDER),  # an order to any other site
        ({"dst_node_id": OTHER}, RefusalReason.SENDER),
        ({"dst_node_id": 0}, RefusalReason.SENDER),
        ({"run_id": RUN + 1}, RefusalReason.FIELDS),
        ({"message_type": "query.secure"}, RefusalReason.FIELDS),
        ({"group_id": "4/4000000"}, RefusalReason.FIELDS),
        ({"message_id": "cd" * 32}, RefusalReason.MESSAGE_ID),
        ({"created_at": math.nan}, RefusalReason.TIMES),
        ({"created_at": math.inf}, RefusalReason.TIMES),
        ({"created_at": time.time() - 1000}, RefusalReason.TIMES),
        ({"created_at": time.time() + 2000}, RefusalReason.TIMES),
        ({"ttl": math.nan}, RefusalReason.TIMES),
        ({"ttl": math.inf}, RefusalReason.TIMES),
        ({"ttl": INSTRUCTION.ttl + 2.0}, RefusalReason.TIMES),
        ({"ttl": 0.0}, RefusalReason.TIMES),
        ({"ttl": -1.0}, RefusalReason.TIMES),
    ],
)
def test_every_field_is_the_instruction_s(change: dict[str, Any], reason: RefusalReason) -> None:
    assert refused(**change) is reason


@pytest.mark.parametrize(
    "row",
    [None, instruction(node_id=OTHER), instruction(ttl=-1.0), instruction(node_id=OTHER, ttl=-1.0)],
    ids=["unknown", "another site's", "expired", "both"],
)
def test_an_instruction_is_the_site_s_own_and_open(row: Any) -> None:
    """In the same words for all that are not its own: else a site learns of the others' instructions."""
    reply = make_reply()
    with pytest.raises(FleetCallRefused) as why:
        reply.announcement(row)
    is_own = row is not None and row.node_id == NODE
    assert why.value.reason is (RefusalReason.ENDED if is_own else RefusalReason.FOREIGN_INSTRUCTION)


@pytest.mark.parametrize("text", ["", "ab" * 31, "AB" * 32, "ab" * 33, "ab" * 31 + "\n\n", "x" * 64])
def test_a_reply_names_an_instruction_by_its_hash(text: str) -> None:
    reply = make_reply()
    reply.request.messages_list[0].metadata.reply_to_message_id = text
    with pytest.raises(FleetCallRefused) as why:
        instruction_id_of(reply.request)
    assert why.value.reason is RefusalReason.FOREIGN_INSTRUCTION


def _twice(request: PushMessagesRequest) -> None:
    request.messages_list.append(request.messages_list[0])


def _without(request: PushMessagesRequest) -> None:
    request.ClearField("messages_list")


def _no_tree(request: PushMessagesRequest) -> None:
    request.ClearField("message_object_trees")


def _two_trees(request: PushMessagesRequest) -> None:
    request.message_object_trees.append(request.message_object_trees[0])


def _two_runtimes(request: PushMessagesRequest) -> None:
    request.clientapp_runtime_list.append(1.0)


@pytest.mark.parametrize("change", [_twice, _without, _no_tree, _two_trees, _two_runtimes])
def test_a_call_has_one_message_and_one_tree(change: Callable[[PushMessagesRequest], None]) -> None:
    reply = make_reply()
    change(reply.request)
    with pytest.raises(FleetCallRefused) as why:
        instruction_id_of(reply.request)
    assert why.value.reason is RefusalReason.SHAPE


def test_content_stands_in_the_tree_alone() -> None:
    beside, neither, both = make_reply(), make_reply(), make_reply()
    beside.request.messages_list[0].content.items.add(key="x")
    neither.request.messages_list[0].ClearField("content")
    both.request.messages_list[0].error.code = 2
    for reply in (beside, neither, both):
        with pytest.raises(FleetCallRefused) as why:
            reply.announcement()
        assert why.value.reason is RefusalReason.CONTENT


@pytest.mark.parametrize("error", [Error(2, "it failed"), Error(0, ""), Error(8)])
def test_an_error_has_no_objects_below_it(error: Error) -> None:
    reply = make_reply(error)
    announced = reply.announcement()
    assert list(announced.tree.objects) == [reply.root]
    assert announced.max_bytes == limits.MAX_ERROR_REPLY_BYTES + limits.EXTRA_REPLY_BYTES
    assert PushMessagesRequest.FromString(announced.request) == reply.request
    reply.request.message_object_trees[0].children.add(object_id="ab" * 32)
    with pytest.raises(FleetCallRefused) as why:
        reply.announcement()
    assert why.value.reason is RefusalReason.TREE_FORM


@pytest.mark.parametrize(
    "sent,counted", [(1.5, 1.5), (-1.0, 0.0), (1e300, 3e6), (math.inf, 3e6), (-math.inf, 0.0), (math.nan, 0.0)]
)
def test_a_run_time_is_a_number_of_seconds(sent: float, counted: float) -> None:
    reply = make_reply()
    reply.request.clientapp_runtime_list[0] = sent
    assert list(PushMessagesRequest.FromString(reply.announcement().request).clientapp_runtime_list) == [counted]


def test_what_flower_does_not_know_does_not_reach_it() -> None:
    reply = make_reply()
    unknown = PushMessagesRequest.FromString(reply.request.SerializeToString() + b"\xfa\x7f\x03abc")
    announced = read_announcement(unknown, INSTRUCTION, time.time(), NODE)
    assert b"abc" not in announced.request


@pytest.mark.parametrize(
    "group,largest",
    [
        ("3/100", 100),
        ("0/0", 0),
        ("3", 1 << 30),
        ("", 1 << 30),
        ("3/-1", 1 << 30),
        ("3/1/2", 1 << 30),
        ("x/1", 1 << 30),
    ],
)
def test_the_largest_reply_is_in_the_group(group: str, largest: int) -> None:
    assert max_reply_bytes(group) == largest
