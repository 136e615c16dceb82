"""A registered site that answers with what no site sends, over the real port, with the fleet port's checks turned off.

What the ServerApp refuses itself is all that stands between the forged replies and the round of the two honest sites.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedveil.console.flower import local_deployment
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.guard.flower.link_states import InstructionRow
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from fedveil.wire import chunking
from tests.deployment.loopback import in_process, over_grpc
from tests.deployment.loopback import lines as lines_of
from tests.deployment.test_hostile_member import CONFIG, DATA, AnswerError, Caller
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    json_body,
    make_reply,
    metadata,
    object_bytes,
    object_id,
    split,
    upload,
)

Attack = Callable[[InstructionRow, int], Reply]


def with_body(reply: Reply, type_: str, body: bytes) -> Reply:
    old = reply.of_type(type_)
    return exchange_object(reply, old, object_bytes(type_, split(reply.objects[old])[1], body))


def other_type(row: InstructionRow, node: int) -> Reply:
    """A root that is no Message: some 25 bytes ended a run."""
    reply, content = make_reply(upload(b"x"), metadata(row, node)), ConfigRecord({"a": 1}).deflate()
    reply.request.message_object_trees[0].CopyFrom(ObjectTree(object_id=object_id(content)))
    reply.request.messages_list[0].metadata.message_id = object_id(content)
    return Reply(reply.request, {object_id(content): content})


def garbage(row: InstructionRow, node: int) -> Reply:
    """A Message whose body is no protobuf."""
    return with_body(make_reply(upload(b"x"), metadata(row, node)), "Message", b"\xff" * 5)


def other_metadata(row: InstructionRow, node: int) -> Reply:
    """A Message that says inside that another node answers another instruction."""
    reply = make_reply(upload(b"x"), metadata(row, node))
    inner = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
    inner.metadata.reply_to_message_id, inner.metadata.src_node_id = "ab" * 32, 12345
    return with_body(reply, "Message", inner.SerializeToString(deterministic=True))


def bomb(row: InstructionRow, node: int) -> Reply:
    """One slice that its Array names 2,400 times: 3.1 GB in the ServerApp."""
    part = b"x" * chunking.SLICE_BYTES
    arrays = ArrayRecord({"000000": Array("uint8", (len(part),), chunking.STYPE, part)})
    reply = make_reply(RecordDict({"fedveil": arrays}), metadata(row, node))
    body = json.loads(split(reply.objects[reply.of_type("Array")])[2])
    return with_body(reply, "Array", json_body(body | {"shape": [2400 * len(part)], "arraychunk_ids": [0] * 2400}))


def unasked(row: InstructionRow, node: int, content: RecordDict) -> Reply:
    """A message to the ServerApp that answers nothing."""
    reply = make_reply(content, metadata(row, node))
    about = reply.request.messages_list[0].metadata
    about.reply_to_message_id, about.src_node_id = "", SUPERLINK_NODE_ID
    return reply


ATTACKS: list[Attack] = [other_type, garbage, other_metadata, bomb]


def send(call: Caller, node: Any, reply: Reply) -> None:
    """Announce a reply and push all that Flower asks for."""
    reply.request.node.node_id = node.node_id
    answer = call("push_messages", reply.request)
    for id_ in answer.objects_to_push:
        push = message_pb2.PushObjectRequest(
            node=node, run_id=reply.request.messages_list[0].metadata.run_id, object_id=id_,
            session_id=answer.session_id, object_content=reply.objects[id_],
        )  # fmt: skip
        call("push_object", push)


def attack(federation: LocalDeployment, end: threading.Event, tried: list[str], problems: list[str]) -> None:
    """Send, for each instruction, two messages that nobody asked for and one reply that no site sends."""
    call, node, answered = Caller(federation, "site-2"), fleet_pb2.PullMessagesRequest().node, set[str]()
    public = public_key_to_bytes(call.key.public_key())
    activated = call("activate_node", fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=1000))
    node.node_id = activated.node_id
    while not end.is_set():
        try:
            response = call("pull_messages", fleet_pb2.PullMessagesRequest(node=node))
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                if tree.object_id in answered:
                    continue
                answered.add(tree.object_id)
                about = message.metadata
                row = InstructionRow(
                    tree.object_id, about.run_id, node.node_id, about.message_type, about.group_id, about.created_at,
                    about.ttl, "",
                )  # fmt: skip
                forge = ATTACKS[len(tried) % len(ATTACKS)]
                send(call, node, unasked(row, node.node_id, upload(b"for another site")))
                other = unasked(row, node.node_id, RecordDict({"x": ConfigRecord({"n": len(tried)})}))
                send(call, node, with_body(other, "Message", b"\xff" * 5))
                send(call, node, forge(row, node.node_id))
                tried.append(forge.__name__)
        except AnswerError as error:
            problems.append(f"the fleet port refused a call: {error}")
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_without_the_fleet_ports_checks_the_server_app_refuses_what_no_site_sends(tmp_path, monkeypatch):
    command = local_deployment.superlink_command
    monkeypatch.setattr(
        local_deployment, "superlink_command", lambda *given: [*command(*given), "--without-fleet-checks"]
    )
    config = CONFIG | {"run.rounds": len(ATTACKS), "cohort.deadline-seconds": 300.0}
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(3)]
    tried, problems, end = list[str](), list[str](), threading.Event()
    with LocalDeployment(sites, tmp_path / "federation", database=True) as federation:
        federation.kill_site("site-2", grace=5.0)
        thread = threading.Thread(target=attack, args=(federation, end, tried, problems))
        thread.start()
        try:
            ended = over_grpc(federation, tmp_path, config, timeout=1200)
        finally:
            end.set()
            thread.join(60)
        assert ended.completed, ended.reason
    assert tried == [forge.__name__ for forge in ATTACKS], problems
    rounds = [line for line in lines_of(tmp_path / "fedavg" / "metrics.jsonl") if line["round"] >= 0]
    assert [line["accepted"] for line in rounds] == [["site-0", "site-1"]] * len(ATTACKS)
    assert all(line["failed"]["site-2"].startswith("refused: reply: ") for line in rounds)
    assert rounds[-1]["weights"] == state_digest(in_process(config, DATA, 2).models()["server"])
    events = audit_log.read_log(tmp_path / audit_log.NAME)
    assert sum(line["event"] == "dropped" for line in events) == 2 * len(ATTACKS)
