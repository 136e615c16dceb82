"""Messages of a hostile server that become larger at a site than they came, or that cannot be decoded.

Flower's own client process pulls them, through the guard, from a SuperNode that has them.
"""

from __future__ import annotations

import json
import tracemalloc
import types
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import context_to_proto, fab_to_proto, run_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PullTaskInputResponse
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp

from fedveil.errors import WireError
from fedveil.guard.clientapp import MessageGuard
from fedveil.records import audit_log
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    json_body,
    make_reply,
    object_bytes,
    object_id,
    split,
    upload,
)

PART, TIMES = b"x" * 100_000, 300
FAB = b"no bundle"


class SuperNode:
    """The runtime API of a SuperNode that holds one message."""

    def __init__(self, message: Reply, folder: Any) -> None:
        self.message, self.confirmed = message, 0
        run = Run.create_empty(11)
        run.fab_id, run.fab_version, run.fab_hash = "us/toy", "0.1.0", object_id(FAB)
        context = Context(11, 7, {"site": "north", "state-dir": str(folder)}, RecordDict(), {})
        self._task = PullTaskInputResponse(
            context=context_to_proto(context), run=run_to_proto(run), fab=fab_to_proto(Fab(object_id(FAB), FAB, {}))
        )

    def PullTaskInput(self, request: Any) -> Any:  # noqa: N802 - Flower's names
        return self._task

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        asked = self.message.request
        return PullAppMessagesResponse(
            messages_list=asked.messages_list, message_object_trees=asked.message_object_trees
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self.message.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed += 1


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> MessageGuard:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, getattr(TaskIdentity, name))
    for name in ("pull_task_input", "pull_and_inflate_object_from_tree", "install_from_fab", "push_message"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))  # put back afterwards
    guard = MessageGuard(run_clientapp, require_policy=False)
    guard.install()
    return guard


def repeated(times: int = TIMES) -> Reply:
    """One slice that its Array names so many times."""
    message = make_reply(upload(PART))
    body = json.loads(split(message.objects[message.of_type("Array")])[2])
    return with_body(message, "Array", body | {"shape": [times * len(PART)], "arraychunk_ids": [0] * times})


def with_body(message: Reply, type_: str, body: Any) -> Reply:
    old = message.of_type(type_)
    content = body if isinstance(body, bytes) else json_body(body)
    return exchange_object(message, old, object_bytes(type_, split(message.objects[old])[1], content))


def several_chunks() -> Reply:
    """An Array of two chunks, as Flower cuts a long one."""
    message = make_reply(upload(b"a" * 100, b"b" * 100))
    array, chunks = message.of_type("Array"), [i for i, c in message.objects.items() if c.startswith(b"ArrayChunk ")]
    body = json.loads(split(message.objects[array])[2]) | {"arraychunk_ids": [0, 1], "shape": [200]}
    return exchange_object(message, array, object_bytes("Array", chunks, json_body(body)))


def other_root() -> Reply:
    message, content = make_reply(upload(PART)), ConfigRecord({"a": 1}).deflate()
    message.request.message_object_trees[0].CopyFrom(ObjectTree(object_id=object_id(content)))
    return Reply(message.request, {object_id(content): content})


HOSTILE = {
    "a chunk named 300 times": (repeated, "an Array must consist of one slice"),
    "a chunk named twice": (lambda: repeated(2), "an Array must consist of one slice"),
    "two chunks": (several_chunks, "an Array must consist of one slice"),
    "an Array of brackets": (
        lambda: with_body(repeated(1), "Array", b"[" * 60_000),
        "an Array must consist of one slice",
    ),
    "a record of brackets": (lambda: with_body(repeated(1), "ArrayRecord", b"[" * 60_000), "Flower cannot decode"),
    "a dict that is none": (lambda: with_body(repeated(1), "RecordDict", b"{}"), "Flower cannot decode"),
    "settings that are none": (lambda: with_body(repeated(1), "ConfigRecord", b"\xff"), "Flower cannot decode"),
    "a Message that is none": (lambda: with_body(repeated(1), "Message", b"\xff" * 5), "Flower cannot decode"),
    "a root of another type": (other_root, "Flower cannot decode"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_message_is_refused_before_it_is_decoded(kind: str, guard: MessageGuard, tmp_path: Any) -> None:
    """The log has a line, nothing is installed, and the server gets the reason."""
    make, reason = HOSTILE[kind]
    sent: list[Message] = []
    guard._push = lambda client, message, context: sent.append(message)
    supernode = SuperNode(make(), tmp_path)
    message, context, _, _ = run_clientapp.pull_task_input(supernode)
    assert message.metadata.message_id == supernode.message.root
    assert len(message.content) == 0
    with pytest.raises(Exception, match=reason):
        run_clientapp.install_from_fab(FAB, skip_prompt=True)
    run_clientapp.push_message(supernode, message, context)
    assert supernode.confirmed == 1  # else its SuperNode keeps the message's objects
    (line,) = audit_log.read_log(tmp_path / audit_log.NAME)
    assert (line["event"], line["app"]) == ("refused", object_id(FAB))
    assert line["reason"].startswith("WireError: message: ")
    (reply,) = sent
    assert reason in reply.error.reason
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


def test_a_message_of_two_megabytes_takes_no_thirty(guard: MessageGuard, tmp_path: Any) -> None:
    def peak(pull: Any) -> int:
        supernode = SuperNode(repeated(), tmp_path)
        tracemalloc.start()
        try:
            pull(supernode)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(run_clientapp.pull_task_input) < 10 * len(PART)
    run_clientapp.pull_and_inflate_object_from_tree = guard._decode  # Flower's own
    assert peak(guard._pull) > TIMES * len(PART)


@pytest.mark.parametrize("slices", [[PART], [bytes(1000), bytes(1000), b"end"]], ids=["one", "equal slices"])
def test_an_honest_message_is_decoded_as_by_flower(slices: list[bytes], guard: MessageGuard, tmp_path: Any) -> None:
    supernode = SuperNode(make_reply(upload(*slices)), tmp_path)
    message = run_clientapp.pull_task_input(supernode)[0]
    arrays = message.content.array_records["fedveil"]
    assert [arrays[name].data for name in sorted(arrays)] == slices
    assert (supernode.confirmed, guard._fault) == (1, None)


def test_an_object_that_does_not_come_is_no_fault_of_the_message(guard: MessageGuard, tmp_path: Any) -> None:
    message = make_reply(upload(PART))
    del message.objects[message.of_type("ConfigRecord")]
    with pytest.raises(ObjectPullError):
        run_clientapp.pull_task_input(SuperNode(message, tmp_path))
    assert guard._fault is None


def test_a_call_that_fails_is_no_fault_of_the_message(guard: MessageGuard, tmp_path: Any) -> None:
    supernode = SuperNode(make_reply(upload(PART)), tmp_path)
    supernode.ConfirmMessageReceived = types.MethodType(lambda self, request: 1 / 0, supernode)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run_clientapp.pull_task_input(supernode)
    assert not isinstance(guard._fault, WireError)
