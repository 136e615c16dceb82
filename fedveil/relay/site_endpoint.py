"""The site's end of a relay: Flower's SuperNode, connected through a folder of orders and a folder of replies.

    order -> this SuperNode -> SuperExec -> client process: the guard, the bundle -> worker     as over the network
    reply <- this SuperNode <- SuperExec <- client process: the guard measures it

The process does not contact any address, and opens only the SuperNode's own socket on loopback. The guard's decision,
the ledger's charge and the audit log are the same as for a message over the network, because the same processes make
them.

| an order | what happens |
|---|---|
| is not a complete letter from the other end | refused and logged in relay-log.jsonl, before the guard |
| has expired by this machine's clock | refused and logged in relay-log.jsonl, before the guard |
| is older than an accepted order of its run | refused and logged, before the guard (message_log.py) |
| was already answered | not accepted again |
| is for a different node than the first order after the start | refused and logged: restart this end |
| belongs to a run that is not a ServerApp's, such as an agent's | refused and logged in relay-log.jsonl |
| passes | accepted, one at a time; the reply has the upload, or the reason why there is none |
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import fab_from_proto, message_from_proto, run_from_proto
from flwr.proto.fab_pb2 import Fab as FabProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.run_pb2 import Run as RunProto
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from google.protobuf.message import DecodeError

from fedveil.errors import FedVeilError, PolicyError, StateError, WireError
from fedveil.federation.message_signatures import claims
from fedveil.guard import reply_check as replies
from fedveil.guard.task_programs import SERVER_APP
from fedveil.records.atomic_files import write_atomic
from fedveil.relay.endpoint_config import EndpointConfig, PeerMessages
from fedveil.relay.mailbox import SUFFIX
from fedveil.relay.message_body import RelayReply, RelayRequest
from fedveil.relay.message_log import DuplicateMessageError, MessageLog
from fedveil.relay.sealed_message import ORDER, REPLY, IncompleteMessageError, encrypt_message
from fedveil.relay.status_events import IDLE
from fedveil.relay.supernode_program import as_this_user
from fedveil.sanitize import sanitize

_LOOK_SECONDS = 0.2  # until the first order; then Flower's own loop polls
_RAISED = 2


@dataclass
class _Taken:
    """The order in progress.

    Attributes:
        tree, left, contents: the reply's parts: all, the missing ones, and the received ones.
    """

    id: str
    file: str
    order: RelayRequest
    message: Message
    run: Run
    fab: Fab
    objects: dict[str, bytes]
    seconds: float = 0.0
    tree: ObjectTree | None = None
    left: set[str] = field(default_factory=set)
    contents: dict[str, bytes] = field(default_factory=dict)


class SiteEndpoint:
    """Replaces a SuperNode's connection. Raises ConfigError or StateError for an unusable key or log."""

    def __init__(self, settings: EndpointConfig, clock: Callable[[], float] = time.time) -> None:
        self._letters = PeerMessages(settings, ORDER, settings.orders)
        self._out, self._said, self._clock = settings.replies, settings.said, clock
        self._book = MessageLog.open(settings.state)
        self._node, self._taken, self._told = 0, dict[int, _Taken](), dict[str, str]()
        self._lock = threading.Lock()

    @contextmanager
    def connection(self, **_given: Any) -> Iterator[tuple[Any, ...]]:
        """Replace Flower's `_init_connection`: wait until the first valid order has arrived."""
        first: _Taken | None = None
        while first is None:
            first = self._next()
            if first is None:
                time.sleep(_LOOK_SECONDS)
        self._node = first.order.node
        waiting = [first]

        def receive() -> tuple[Message, ObjectTree] | None:
            taken = waiting.pop() if waiting else self._next()
            return None if taken is None else self._begun(taken)

        yield (
            self._node, receive, self.send, self.get_run, self.get_fab, self.pull_object, self.push_object,
            lambda _run, _message: None,
        )  # fmt: skip

    def get_run(self, run: int) -> Run:
        """Return the run, as a SuperLink would."""
        return self._of(run).run

    def get_fab(self, _digest: str, run: int) -> Fab:
        """Return the bundle, as a SuperLink would; the guard checks that it has this digest."""
        return self._of(run).fab

    def pull_object(self, run: int, object_id: str) -> bytes:
        """Return one part of the order's message."""
        return self._of(run).objects[object_id]

    def send(self, message: Message, tree: ObjectTree, seconds: float) -> tuple[set[str], str]:
        """Announce the reply, and request all its parts."""
        taken = self._of(message.metadata.run_id)
        taken.tree, taken.seconds, taken.contents = tree, float(seconds), {}
        taken.left = {part.object_id for part in iterate_object_tree(tree)}
        return set(taken.left), "relay"

    def push_object(self, run: int, _session: str, object_id: str, content: bytes) -> None:
        """Store one part of the reply; the last part writes the message. Raises StateError if it cannot be written."""
        with self._lock:
            taken = self._of(run)
            taken.contents[object_id] = content
            taken.left.discard(object_id)
            if not taken.left:
                self._answer(taken)

    def _of(self, run: int) -> _Taken:
        if run not in self._taken:
            raise StateError(f"relay: a part of run {run} was requested, but no order of that run is in progress")
        return self._taken[run]

    def _begun(self, taken: _Taken) -> tuple[Message, ObjectTree]:
        run = taken.message.metadata.run_id
        self._book.take(taken.id, str(run), taken.order)
        self._said.say("taken", f"{taken.file}: order of run {run} accepted")
        self._taken = {run: taken}  # one at a time, as in a SuperNode
        bare = remove_content_from_message(taken.message)
        bare.metadata.__dict__["_message_id"] = taken.message.object_id
        return bare, get_object_tree(taken.message)

    def _next(self) -> _Taken | None:
        """Return the next valid order; None if there is none. Refusals are reported and logged."""
        while (name := self._letters.next(self._tell)) is not None:
            self._told.clear()
            try:
                return self._judged(name)
            except IncompleteMessageError as error:
                self._said.say("refused", str(error))  # it may be complete at the next scan, so do not log it
            except DuplicateMessageError as error:
                self._said.say("known", f"{name}: {error}")
            except (WireError, PolicyError) as error:
                self._book.refuse(name, str(error))
                self._said.say("refused", f"{name}: {error}" if name not in str(error) else str(error))
        if not self._letters.incoming.waits:
            self._tell(IDLE)
        return None

    def _tell(self, what: str, words: str = "") -> None:
        """Report a status event unless it repeats the last one."""
        if self._told.get(what) != words:
            self._told[what] = words
            self._said.say(what, words)

    def _judged(self, name: str) -> _Taken:
        head, content = self._letters.opened(name)
        order = RelayRequest.from_bytes(content)
        late = self._clock() - order.expires / 1000
        if late >= 0:
            raise PolicyError(
                f"ended: the server is no longer waiting for this order, which expired {late / 3600:.1f} h ago by this "
                "machine's clock; skip it, or correct the clock"
            )
        if self._node and order.node != self._node:
            raise PolicyError(
                f"node: the first order since the start named {self._node}, but this one names {order.node}: the site "
                "has a new node key; start fedveil relay import again"
            )
        try:
            message = message_from_proto(MessageProto.FromString(order.message))
            run, fab = run_from_proto(RunProto.FromString(order.run)), fab_from_proto(FabProto.FromString(order.bundle))
            objects = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
        except (DecodeError, ValueError, TypeError, KeyError) as error:
            raise WireError(
                f"order: Flower's message, run and bundle cannot be read ({type(error).__name__}); "
                "both ends need the same version of Flower"
            ) from None
        if (message.metadata.run_id, message.metadata.dst_node_id) != (run.run_id, order.node):
            raise WireError("order: its message, run and node do not match each other; ask for it again")
        if run.primary_task_type not in ("", SERVER_APP):
            raise PolicyError(
                f"run: only ServerApp runs ({SERVER_APP}) are accepted, but this one has type "
                f"{sanitize(run.primary_task_type, 80)}; ask the server's operator which bundle was submitted"
            )
        self._book.require_new(head.id, str(run.run_id), order)
        return _Taken(head.id, name, order, message, run, fab, objects)

    def _answer(self, taken: _Taken) -> None:
        """Write the message with the reply atomically. Raises StateError."""
        assert taken.tree is not None
        message = inflate_object_from_contents(taken.tree.object_id, taken.contents)
        if not isinstance(message, Message):
            raise StateError(f"relay: the reply is not a message but {type(message).__name__}")
        reply = reply_of(message, taken.id, taken.seconds)
        name = f"reply-{taken.order.made}-{taken.id[:8]}{SUFFIX}"
        try:
            content = encrypt_message(reply.packed(), REPLY, taken.id, self._letters.own, self._letters.peer)
            write_atomic(self._out / name, content)
            self._book.answer(taken.id, name)
        except (OSError, FedVeilError) as error:
            self._said.say("failed", f"{taken.file}: its reply cannot be written: {error}; free some disk space")
            raise StateError(f"relay: the reply cannot be written: {error}") from None
        why = f" (without an upload: {reply.reason})" if reply.code else ""
        self._said.say("answered", f"{taken.file}: answered: {name}{why}")
        self._taken = {}


def reply_of(message: Message, order: str, seconds: float) -> RelayReply:
    """Convert a message from the guard to a relay reply. Raises PolicyError, WireError if the guard did not make it."""
    if message.has_error():
        return RelayReply(order, message.error.code or _RAISED, message.error.reason or "", "", "", seconds, b"")
    signature = message.content.config_records.pop(claims.RECORD, None)
    signed = "{key}:{signature}".format(**claims.read_signature(dict(signature), False)) if signature else ""
    anchor = message.content.config_records.pop("log", None)
    upload = b"".join(replies.upload_slices(message.content))
    return RelayReply(order, 0, "", str(anchor["head"]) if anchor else "", signed, seconds, upload)


def main(settings: str) -> None:
    """Run the process with the arguments of Flower's own `flower-supernode`; it never contacts the address in them."""
    end = SiteEndpoint(EndpointConfig.of_text(settings))
    importlib.import_module("flwr.supernode.start_client_internal")._init_connection = end.connection  # type: ignore[attr-defined]
    as_this_user()
