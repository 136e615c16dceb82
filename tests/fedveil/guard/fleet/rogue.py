"""A registered site that speaks the fleet protocol by itself: a seeded generator of calls, and what must hold then.

    server      sends instructions to two honest sites and to the rogue, round by round, and takes the replies
    honest      each does what a SuperNode does: pull, fetch, confirm, announce, push
    rogue       holds the key of a registered node, so every call of its has its own node number, and all else is free

The rogue is told more than a site can learn: the numbers of the other sites' instructions, objects and sessions.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedveil.guard.flower import link_states
from fedveil.wire import chunking
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    make_reply,
    metadata,
    object_bytes,
    object_id,
    split,
    upload,
)

NORTH, SOUTH, ROGUE = 0, 1, 2
SITES = ("north", "south", "rogue")
_ANSWERS = (400, 403, 412, 503)  # after these an honest SuperNode goes on; any other ends its loop
PATIENCE_SECONDS = 120.0  # a SuperNode's has no end; a machine that runs other tests beside needs a part of it
Call = Callable[[str, Any], Any]


class AnswerError(Exception):
    """A call that was not answered with a result: the HTTP status, or the name of an exception without one."""

    def __init__(self, status: int | str) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Rogue:
    """The generator of calls.

    Attributes:
        statuses: of the answers, by call.
        answers: all bytes that came back.
    """

    rng: random.Random
    call: Call
    node_id: int
    run: int
    key: bytes
    row: link_states.InstructionRow
    own_ids: list[str]
    foreign_ids: list[str]
    statuses: Counter[tuple[str, Any]] = field(default_factory=Counter)
    answers: list[bytes] = field(default_factory=list)
    sessions: list[tuple[str, Reply]] = field(default_factory=list)
    foreign_sessions: list[str] = field(default_factory=list)
    foreign_nodes: list[int] = field(default_factory=list)
    _objects: dict[str, bytes] = field(default_factory=dict)

    def act(self, calls: int) -> None:
        """Make so many calls, some of them repeated, some four at once."""
        left = calls
        while left > 0:
            name, request = self._draw()
            times = self.rng.choice([1, 1, 1, 1, 2, 3, 10, 50])
            times = min(times, left)
            left -= times
            if times == 4 or (times == 10 and self.rng.random() < 0.5):
                threads = [threading.Thread(target=self._ask, args=(name, request)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
            else:
                for _ in range(times):
                    self._ask(name, request)

    def _ask(self, name: str, request: Any) -> Any:
        try:
            response = self.call(name, request)
        except AnswerError as error:
            self.statuses[name, error.status] += 1
            return None
        self.statuses[name, 200] += 1
        self.answers.append(response.SerializeToString())
        if name == "push_messages":
            self._follow(request, response)
        return response

    def _follow(self, request: Any, response: Any) -> None:
        """Remember a session, and push some of its objects."""
        reply = Reply(request, self._objects)
        self.sessions.append((response.session_id, reply))
        if self.rng.random() < 0.5:
            for object_id_ in list(response.objects_to_push)[: self.rng.choice([1, 3, 100])]:
                content = self._objects.get(object_id_, b"")
                if self.rng.random() < 0.1:
                    content = self._spoil(content)
                push = self._push_request(response.session_id, object_id_, content)
                try:
                    self.answers.append(self.call("push_object", push).SerializeToString())
                    self.statuses["push_object", 200] += 1
                except AnswerError as error:
                    self.statuses["push_object", error.status] += 1

    # The alphabet

    def _draw(self) -> tuple[str, Any]:
        name = self.rng.choices(
            [
                "register_node", "unregister_node", "activate_node", "deactivate_node", "send_node_heartbeat",
                "pull_messages", "get_run", "get_fab", "pull_object", "confirm_message_received", "push_messages",
                "push_object",
            ],
            [1, 1, 1, 0.3, 3, 4, 2, 2, 8, 3, 20, 15],
        )[0]  # fmt: skip
        return name, getattr(self, f"_{name}")()

    @property
    def node(self) -> Node:
        return Node(node_id=self.node_id)

    def _register_node(self) -> Any:
        return RegisterNodeFleetRequest(public_key=self.key)

    def _unregister_node(self) -> Any:
        return UnregisterNodeFleetRequest(node_id=self.node_id)

    def _interval(self) -> float:
        return self.rng.choice([30.0, 30.0, 10.0, 60.0, 1800.0, 0.0, -1.0, math.nan, math.inf])

    def _activate_node(self) -> Any:
        return ActivateNodeRequest(public_key=self.key, heartbeat_interval=self._interval())

    def _deactivate_node(self) -> Any:
        return DeactivateNodeRequest(node_id=self.node_id)

    def _send_node_heartbeat(self) -> Any:
        return SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=self._interval())

    def _pull_messages(self) -> Any:
        return PullMessagesRequest(node=self.node, message_ids=[self._id()] if self.rng.random() < 0.2 else [])

    def _some_run(self) -> int:
        return self.rng.choice([self.run, self.run, self.run, 0, 1, 2**64 - 1, self.rng.getrandbits(64)])

    def _id(self) -> str:
        kind = self.rng.random()
        if kind < 0.35:
            return self.rng.choice(self.own_ids)
        if kind < 0.7:
            return self.rng.choice(self.foreign_ids)
        return self.rng.choice(["", "x", "0" * 64, "AB" * 32, self.rng.randbytes(32).hex(), "é" * 32])

    def _get_run(self) -> Any:
        return GetRunRequest(node=self.node, run_id=self._some_run())

    def _get_fab(self) -> Any:
        return GetFabRequest(node=self.node, run_id=self._some_run(), hash_str=self.rng.choice(["0", "", "ab" * 32]))

    def _pull_object(self) -> Any:
        return PullObjectRequest(node=self.node, run_id=self._some_run(), object_id=self._id())

    def _confirm_message_received(self) -> Any:
        return ConfirmMessageReceivedRequest(node=self.node, run_id=self._some_run(), message_object_id=self._id())

    def _push_request(self, session: str, object_id_: str, content: bytes) -> Any:
        return PushObjectRequest(
            node=self.node, run_id=self.run, session_id=session, object_id=object_id_, object_content=content
        )

    def _push_object(self) -> Any:
        session, reply = self.rng.choice(self.sessions) if self.sessions else ("", self._reply())
        if self.rng.random() < 0.4:
            session = self.rng.choice(["", "x", *self.foreign_sessions, str(self.rng.getrandbits(128))])
        id_, content = self.rng.choice(sorted(reply.objects.items()))
        if self.rng.random() < 0.3:
            id_ = self._id()
        if self.rng.random() < 0.5:
            content = self._spoil(content)
        request = self._push_request(session, id_, content)
        request.run_id = self._some_run()
        return request

    def _spoil(self, content: bytes) -> bytes:
        """Another object in the place of one."""
        return self.rng.choice([
            b"", content[:-1], content + b"x", content[: len(content) // 2], self.rng.randbytes(2000), b"\0",
            object_bytes("ArrayChunk", [], b"x" * self.rng.choice([1, 100_000])),
            object_bytes("Array", [], b"[" * 60_000), object_bytes("ConfigRecord", [], b"\xff"),
        ])  # fmt: skip

    def _reply(self) -> Reply:
        """An honest reply to the own instruction, or one whose objects are not what they should be."""
        kind = self.rng.random()
        if kind < 0.15:
            return make_reply(Error(self.rng.choice([0, 2, 8]), "x"), metadata(self.row, self.node_id))
        slices = [self.rng.randbytes(self.rng.choice([10, 500, 3000])) for _ in range(self.rng.choice([1, 2, 5]))]
        reply = make_reply(upload(*slices), metadata(self.row, self.node_id))
        if kind < 0.4:
            return reply
        return self._other_objects(reply)

    def _other_objects(self, reply: Reply) -> Reply:
        """A reply whose hashes are right and whose objects are not."""
        type_ = self.rng.choice(["Array", "ArrayRecord", "RecordDict", "ConfigRecord", "Message"])
        old = reply.of_type(type_)
        _, children, body = split(reply.objects[old])
        changed = self.rng.choice([
            body.replace(b"[0]", b"[" + b", ".join([b"0"] * 2400) + b"]"), body.replace(b"uint8", b"float"),
            body.replace(self.row.message_id.encode(), os.urandom(32).hex().encode()), b"", b"\xff" * 5,
            b"[" * 5000, b"{}",
        ])  # fmt: skip
        new_type = self.rng.choice([type_, type_, "ConfigRecord", "Array", "Nothing"])
        return exchange_object(reply, old, object_bytes(new_type, children, changed))

    def _push_messages(self) -> Any:
        reply = self._reply()
        request = PushMessagesRequest()
        request.CopyFrom(reply.request)
        self._objects = self._objects | reply.objects
        if self.rng.random() < 0.5:
            self._forge_metadata(request)
        if self.rng.random() < 0.4:
            self._forge_tree(request)
        if self.rng.random() < 0.1:
            self.rng.choice([self._twice, self._empty, self._content])(request)
        request.node.node_id = self.node_id
        return request

    def _forge_metadata(self, request: PushMessagesRequest) -> None:
        about = request.messages_list[0].metadata
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            field_ = self.rng.choice([
                "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "ttl",
                "message_type", "created_at", "src_task_id",
            ])  # fmt: skip
            if field_ in ("ttl", "created_at"):
                values: list[Any] = [0.0, 1.0, -1.0, math.nan, math.inf, 1e300, time.time(), 3600.0]
            elif field_ in ("message_id", "reply_to_message_id"):
                values = ["", self._id(), self._id(), self.row.message_id]
            elif field_ in ("group_id", "message_type"):
                values = ["", "0", "query.secure", "train", "é" * 2000, "3/99999999"]
            else:
                values = [0, 1, 2**64 - 1, self.node_id, self.rng.getrandbits(64), *self.foreign_nodes]
            setattr(about, field_, self.rng.choice(values))
        if self.rng.random() < 0.5:  # an order: to the ServerApp, or to another site
            about.reply_to_message_id, about.src_node_id = "", SUPERLINK_NODE_ID
            about.dst_node_id = self.rng.choice([SUPERLINK_NODE_ID, *self.foreign_nodes])
            about.created_at, about.ttl = time.time(), 3600.0
            about.message_id, about.run_id = request.message_object_trees[0].object_id, self.run

    def _forge_tree(self, request: PushMessagesRequest) -> None:
        root = request.message_object_trees[0]
        nodes = list(iterate_object_tree(root))
        chosen = self.rng.choice(nodes)
        kind = self.rng.randrange(7)
        if kind == 0:
            chosen.object_id = self._id()
        elif kind == 1:
            chosen.children.extend(ObjectTree(object_id=os.urandom(32).hex()) for _ in range(self.rng.choice([1, 9])))
        elif kind == 2:
            chosen.children.append(ObjectTree(object_id=self.rng.choice(nodes).object_id))
        elif kind == 3:  # an object that the server sends again, with children that it has not got
            squatted = ObjectTree(object_id=self._id(), children=[ObjectTree(object_id=os.urandom(32).hex())])
            chosen.children.append(squatted)
        elif kind == 4:
            count = self.rng.choice([10, 300, 3000])
            chosen.children.extend(ObjectTree(object_id=os.urandom(32).hex()) for _ in range(count))
        elif kind == 5:
            moved = ObjectTree(object_id=os.urandom(32).hex())
            moved.children.add().CopyFrom(root)
            root.CopyFrom(moved)
        else:
            del chosen.children[:]

    @staticmethod
    def _twice(request: PushMessagesRequest) -> None:
        request.messages_list.append(request.messages_list[0])

    @staticmethod
    def _empty(request: PushMessagesRequest) -> None:
        request.ClearField("messages_list")

    @staticmethod
    def _content(request: PushMessagesRequest) -> None:
        request.messages_list[0].content.items.add(key="x")


class Server:
    """The ServerApp's side: its messages, and the replies that it is given."""

    def __init__(self, state: Any, run: int, nodes: list[int]) -> None:
        self.state, self.run, self.nodes = state, run, nodes
        self.sent: dict[tuple[int, int], str] = {}
        self.problems: list[str] = []

    def send(self, round_: int, site: int) -> str:
        """Send an instruction, whose record `config` is the same in every round."""
        slice_ = Array("uint8", (3000,), chunking.STYPE, bytes([round_ + 1]) * 3000)
        content = RecordDict({
            "fedveil": ArrayRecord({chunking.slice_key(0): slice_}), "config": ConfigRecord({"a": 1}),
            "order": ConfigRecord({"site": site, "round": round_, "salt": os.urandom(16)}),
        })  # fmt: skip
        with no_object_id_recompute():
            about = Metadata(
                self.run, "", SUPERLINK_NODE_ID, self.nodes[site], "", f"{round_}/4000000", time.time(), 600.0, "train"
            )
            message = Message(content, metadata=about)  # type: ignore[call-overload]
            message.metadata.__dict__["_message_id"] = message.object_id
            tree = get_object_tree(message)
            objects = {id_: part.deflate() for id_, part in get_all_nested_objects(message).items()}
        try:
            session = self.state.start_session(self.run)
            stored, missing = self.state.store_message_and_object_tree(message, tree, session)
            assert stored
            for id_ in missing:
                assert self.state.store_object(self.run, session, id_, objects[id_])
        except Exception as error:
            self.problems.append(f"the server's own push failed: {type(error).__name__}")
        self.sent[round_, site] = message.metadata.message_id
        return str(message.metadata.message_id)

    def take(self, message_id: str) -> dict[str, bytes] | None:
        """The objects of a reply, by id; None while there is none. Whatever else is handed out is a problem."""
        for message in self.state.get_message_ins(node_id=SUPERLINK_NODE_ID, limit=100):
            self.problems.append(f"handed to the ServerApp: {message.metadata.message_type[:20]}")
        row = link_states.find_instruction(self.state, message_id)
        if row is None or not row.reply_id or link_states.is_object_missing(self.state.object_store, row.reply_id):
            return None
        tree = self.state.object_store.get_object_tree(row.reply_id)
        return {n.object_id: self.state.object_store.get(n.object_id) for n in iterate_object_tree(tree)}

    def judge_reply(self, message_id: str, objects: dict[str, bytes]) -> None:
        """Check that a reply is one that the ServerApp can read, whoever sent it."""
        row = link_states.find_instruction(self.state, message_id)
        assert row is not None
        try:
            message = inflate_object_from_contents(row.reply_id, dict(objects))
        except Exception as error:
            self.problems.append(f"a reply cannot be read: {type(error).__name__}")
            return
        if not isinstance(message, Message):
            self.problems.append("a reply is no message")
            return
        about = message.metadata
        if (about.reply_to_message_id, about.src_node_id) != (message_id, row.node_id):
            self.problems.append("a reply says that it is another")
        if message.has_content():
            arrays = [len(a.data) for record in message.content.array_records.values() for a in record.values()]
            if sum(arrays) > 2 * sum(map(len, objects.values())):
                self.problems.append("a reply is larger than what was sent")


def answer_honestly(
    call: Call, node_id: int, run: int, expected: str, content: RecordDict, sessions: list[str]
) -> Reply:
    """Do what a SuperNode does for one instruction. Raises AnswerError, AssertionError."""
    node, end = Node(node_id=node_id), time.monotonic() + PATIENCE_SECONDS
    while True:
        response = _patiently(call, "pull_messages", PullMessagesRequest(node=node))
        if response.messages_list:
            break
        assert time.monotonic() < end, "no instruction came"
        time.sleep(0.02)
    about, tree = response.messages_list[0].metadata, response.message_object_trees[0]
    assert tree.object_id == expected, "an instruction that the server did not send"
    _patiently(call, "get_run", GetRunRequest(node=node, run_id=run))
    for id_ in {n.object_id for n in iterate_object_tree(tree)}:
        got = _patiently(call, "pull_object", PullObjectRequest(node=node, run_id=run, object_id=id_))
        assert object_id(got.object_content) == id_, "an object is not there"
    confirm = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=tree.object_id)
    _patiently(call, "confirm_message_received", confirm)
    row = link_states.InstructionRow(
        tree.object_id, run, node_id, about.message_type, about.group_id, about.created_at, about.ttl, ""
    )
    reply = make_reply(content, metadata(row, node_id))
    answer = _patiently(call, "push_messages", reply.request)
    sessions.append(answer.session_id)
    for id_ in answer.objects_to_push:
        push = PushObjectRequest(
            node=node, run_id=run, session_id=answer.session_id, object_id=id_, object_content=reply.objects[id_]
        )
        assert _patiently(call, "push_object", push).stored, "an object was not stored"
    return reply


def _patiently(call: Call, name: str, request: Any) -> Any:
    """Ask again after UNAVAILABLE, as a SuperNode does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call(name, request)
        except AnswerError as error:
            if error.status != 503 or time.monotonic() > end:
                raise
            time.sleep(0.02)


def end_run(state: Any, run: int) -> None:
    """End Flower's run."""
    state.finish_task(state.get_run_info(run_ids=[run])[0].primary_task_id, SubStatus.COMPLETED, "")


def is_bearable(status: Any) -> bool:
    """Return whether an honest SuperNode would go on after such an answer."""
    return status == 200 or status in _ANSWERS
