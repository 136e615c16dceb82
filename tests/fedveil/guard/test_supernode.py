"""Flower's own look for messages and sending of replies, with what ends under them; each fault beside Flower's own."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import flwr.supernode.start_client_internal as flowers
import pytest
from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.constant import TaskType
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate import NodeStateFactory

from fedveil.guard import flower, supernode
from tests.fedveil.guard.test_received_bundle import bundle

RUN = 7
_ZIP = bundle(("pyproject.toml", b""))
BUNDLE = Fab(hashlib.sha256(_ZIP).hexdigest(), _ZIP, {})
Look = Callable[..., int | None]
OURS: tuple[Look, Callable[..., None]] = (
    supernode.pull_message(flowers._pull_and_store_message),
    supernode.push_reply(flowers._push_messages),
)
FLOWERS: tuple[Look, Callable[..., None]] = (flowers._pull_and_store_message, flowers._push_messages)


def _message(reply_to: str = "", text: str = "") -> Message:
    metadata = Metadata(RUN, "", 1, 2, reply_to, text, now().timestamp(), 100.0, "train")
    with no_object_id_recompute():
        message = Message(content=RecordDict(), metadata=metadata)
        message.metadata.__dict__["_message_id"] = message.object_id
    return message


@dataclass
class Node:
    """A SuperNode's state, a server that has some messages, and what was sent to it."""

    look: Look
    push: Callable[..., None]
    messages: list[Message] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    ended: bool = False
    get_run: Callable[[int], Run] = Run.create_empty

    def __post_init__(self) -> None:
        stores = ObjectStoreFactory()
        self.store, self.state = stores.store(), NodeStateFactory(stores).state()
        self.state.set_node_id(2)
        self.state.store_run(Run.create_empty(RUN))

    def pull(self) -> int | None:
        def pull_object(_run: int, object_id: str) -> bytes:
            if self.ended:
                raise RunNotRunningException
            return self.objects[object_id]

        self.objects = {i: o.deflate() for m in self.messages for i, o in get_all_nested_objects(m).items()}
        return self.look(
            state=self.state, object_store=self.store, node_config={}, receive=self._receive, get_run=self.get_run,
            get_fab=lambda *_: BUNDLE, pull_object=pull_object, confirm_message_received=lambda *_: None,
            trusted_entities=None,
        )  # fmt: skip

    def _receive(self) -> Any:
        return (self.messages[0], get_object_tree(self.messages.pop(0))) if self.messages else None

    def send(self) -> None:
        def send(message: Message, tree: Any, _seconds: float) -> tuple[set[str], str]:
            self.sent.append(message.metadata.reply_to_message_id)
            return {tree.object_id}, "session"

        self.push(state=self.state, object_store=self.store, send=send, push_object=lambda *_: None)

    def answer(self, message_id: str, whole: bool = True) -> Message:
        """What a client process does at its end."""
        reply = _message(message_id)
        session = self.state.start_session(RUN)
        self.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
        if whole:
            for object_id, content in get_all_nested_objects(reply).items():
                self.state.store_object(RUN, session, object_id, content.deflate())
        return reply

    def tasks(self) -> list[str]:
        return [task.status.status for task in self.state.get_tasks(run_ids=[RUN])]

    def kept(self) -> int:
        return len(self.state.msg_store)


def test_a_message_whose_run_ends_while_its_parts_are_on_their_way_leaves_nothing() -> None:
    node = Node(*OURS, messages=[_message()], ended=True)
    assert node.pull() is None
    assert node.kept() == 0
    assert node.tasks() == ["finished"]

    stock = Node(*FLOWERS, messages=[_message()], ended=True)
    assert stock.pull() is None
    assert (stock.kept(), stock.tasks()) == (1, ["pending"])  # and a client process will wait for its parts


@pytest.mark.parametrize("kind", [*TaskType, "flwr-of-a-later-release"])
def test_a_run_of_any_type_makes_tasks_for_clientapps_alone(kind: str) -> None:
    """So the guard judges the bundle, and the audit log has its line. Flower makes a task for an agent, unguarded."""
    run = dataclasses.replace(Run.create_empty(RUN), primary_task_type=str(kind), fab_hash="ab")
    asked = supernode._for_client_app(lambda _run: dataclasses.replace(run))(RUN)
    assert asked == dataclasses.replace(run, primary_task_type="flwr-serverapp")


@pytest.mark.parametrize(("look_push", "kind"), [(OURS, TaskType.CLIENT_APP), (FLOWERS, TaskType.AGENT_APP)])
def test_the_message_of_an_agents_run_makes_a_task_that_the_guard_judges(
    monkeypatch: pytest.MonkeyPatch, look_push: tuple[Look, Callable[..., None]], kind: TaskType
) -> None:
    monkeypatch.setattr(flowers, "get_fused_config_from_fab", lambda *_: {})
    node = Node(*look_push, messages=[_message()])
    node.state = NodeStateFactory(ObjectStoreFactory()).state()  # which does not know the run
    node.state.set_node_id(2)
    node.get_run = lambda run: dataclasses.replace(
        Run.create_empty(run), primary_task_type=TaskType.AGENT_APP, fab_hash=BUNDLE.hash_str
    )
    assert node.pull() == RUN
    assert [task.type for task in node.state.get_tasks(run_ids=[RUN])] == [kind]


def test_a_message_that_comes_whole_is_as_with_flower() -> None:
    for look, push in (OURS, FLOWERS):
        node = Node(look, push, messages=[message := _message()])
        assert node.pull() == RUN
        node.answer(message.object_id)
        node.send()
        assert (node.sent, node.kept()) == ([message.object_id], 0)
        assert node.pull() is None


@pytest.mark.parametrize("calls", [OURS, FLOWERS], ids=["ours", "flower's"])
def test_a_reply_that_nobody_waits_for_makes_no_later_one_late(calls: Any) -> None:
    node = Node(*calls, messages=[_message(text="first"), _message(text="second")])
    first, second = (m.object_id for m in node.messages)
    assert node.pull() == RUN
    node.answer("ab" * 32)  # of a message that was given up
    node.send()  # takes that one
    node.answer(first)
    if calls is OURS:
        del node.messages[0:]
        assert node.pull() is not None  # no message, but a reply that waits
        node.send()
        assert node.sent == ["ab" * 32, first]
        assert node.pull() is None
    else:
        node.messages, pending_messages = [], node.messages
        assert node.pull() is None  # so nothing is sent until the next message
        node.messages = pending_messages
        assert node.pull() == RUN
        node.send()
        assert node.sent[-1] == first != second


@pytest.mark.parametrize(("calls", "stay"), [(OURS, 0), (FLOWERS, 2)], ids=["ours", "flower's"])
def test_the_objects_of_a_message_that_its_client_process_never_confirmed_go_with_the_reply(
    calls: Any, stay: int
) -> None:
    """A server whose messages end client processes would fill the SuperNode, message by message."""
    node = Node(*calls, messages=[message := _message(text="first")])
    assert node.pull() == RUN
    node.answer(message.object_id)
    node.send()
    assert node.sent == [message.object_id]
    assert len(node.store) == stay


def test_a_reply_whose_parts_stop_coming_ends_and_goes() -> None:
    node = Node(*OURS, messages=[message := _message()])
    node.pull()
    node.answer(message.object_id, whole=False)
    for session in node.state._object_push_sessions.values():
        session.expires_at = now() - timedelta(seconds=1)
    sender = threading.Thread(target=node.send, daemon=True)
    sender.start()
    sender.join(10)
    assert not sender.is_alive()
    assert node.kept() == 0


@pytest.mark.long
def test_a_reply_whose_parts_are_still_coming_is_waited_for() -> None:
    for calls in (OURS, FLOWERS):
        node = Node(*calls, messages=[message := _message()])
        node.pull()
        reply = node.answer(message.object_id, whole=False)
        sender = threading.Thread(target=node.send, daemon=True)
        sender.start()
        sender.join(1.5)
        assert sender.is_alive()
        (session,) = node.state._object_push_sessions
        for object_id, content in get_all_nested_objects(reply).items():
            node.state.store_object(RUN, session, object_id, content.deflate())
        sender.join(10)
        assert not sender.is_alive()
        assert node.sent == [message.object_id]


def test_both_are_put_in_flowers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pull_and_store_message", "_push_messages", "time"):
        monkeypatch.setattr(flowers, name, getattr(flowers, name))  # puts them back afterwards
    functions = (
        ("keepalive.patch_supernode_keepalive", "response_sizes.limit_grpc_responses")
        if flower.installed_release().speaks == "gRPC"
        else ("redirects.forbid_redirects", "response_sizes.limit_http_responses")
    )
    called: list[str] = []
    for function in functions:
        monkeypatch.setattr(f"fedveil.guard.flower.{function}", lambda name=function: called.append(name))
    before = flowers._pull_and_store_message, flowers._push_messages
    supernode.patch_supernode()
    assert called == [*functions]
    assert flowers._pull_and_store_message is not before[0]
    assert flowers._push_messages is not before[1]
    names = {flowers._pull_and_store_message.__qualname__, flowers._push_messages.__qualname__}
    assert names == {"pull_message.<locals>.look", "push_reply.<locals>.push"}


class Refusal(Exception):
    """As gRPC's error that names a status."""

    def code(self) -> Any:
        return types.SimpleNamespace(name="UNAUTHENTICATED")


def test_any_error_of_a_step_is_waited_after_longer_each_time_and_the_loop_goes_on() -> None:
    slept: list[float] = []
    left = [ValueError(f"locked {n}") for n in range(8)]

    def step(**_given: Any) -> int:
        if left:
            raise left.pop()
        return RUN

    errors = supernode.LoopErrors(slept.append)
    look = supernode.pull_message(step, errors)
    state = Node(*OURS).state
    calls = {
        "pull_object": None,
        "confirm_message_received": None,
        "state": state,
        "object_store": None,
        "get_run": None,
    }
    assert [look(**calls) for _ in range(9)] == [None] * 8 + [RUN]
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60]
    left.append(ValueError())
    assert look(**calls) is None
    assert slept[-1] == 1  # begun anew once it went well


@pytest.mark.parametrize("wrap", [supernode.pull_message, supernode.push_reply])
def test_a_key_that_the_server_refuses_ends_the_loop(wrap: Callable[..., Any]) -> None:
    def step(**_given: Any) -> None:
        raise Refusal

    calls = {"pull_object": None, "confirm_message_received": None, "state": Node(*OURS).state, "object_store": None}
    calls["get_run"] = None
    with pytest.raises(Refusal):
        wrap(step)(**calls)


def test_a_reply_that_is_gone_ends_no_loop() -> None:
    slept: list[float] = []
    node = Node(OURS[0], supernode.push_reply(flowers._push_messages, supernode.LoopErrors(slept.append)))
    node.state.store_message(_message("1" * 64))
    node.send()  # its tree is unknown: Flower's own raises
    assert slept == [1]
