"""The server's end of a relay: a SuperNode that connects in place of a site and exports its messages as letters.

    SuperLink -- message, run, bundle --> this process -- order --> folder ... carrier ... the site
    SuperLink <-- its own reply --------- this process <-- reply -- folder ...

It does not start a SuperExec or client process, so no bundle ever runs here. It has the site's node key, so it
acts as the site towards the server. It sees what the server sees, so it belongs on the server's machine.

| case | what happens |
|---|---|
| a secure-aggregation message, which waits only 120 s | refused here immediately, with the reason |
| an order that would be larger than `most_bytes` | refused here immediately, with the reason |
| an order expires without a reply | its file is withdrawn; a later reply is refused |
| this process ends | its orders are withdrawn: the server considers the site offline, and the next attempt has a new
  order |
| a reply without an open order | refused |
| a reply that was already accepted, or a second reply to the same order | not accepted again |
| a reply for a run that has ended | discarded and reported |
| anything from the site's SuperNode except upload, reason, anchor and signature | not part of the letter |
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import fab_to_proto, message_to_proto, run_to_proto
from flwr.supercore import log
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.run import Run, RunNotRunningException

from fedveil.errors import StateError, WireError
from fedveil.guard import reply_check as replies
from fedveil.records import audit_log
from fedveil.records.atomic_files import write_atomic
from fedveil.relay.endpoint_config import EndpointConfig, PeerMessages
from fedveil.relay.mailbox import SUFFIX
from fedveil.relay.message_body import RelayReply, RelayRequest
from fedveil.relay.message_log import NAME, DuplicateMessageError
from fedveil.relay.sealed_message import ORDER, REPLY, IncompleteMessageError, encrypt_message
from fedveil.relay.supernode_program import as_this_user
from fedveil.sanitize import sanitize
from fedveil.wire import chunking

_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_QUESTION = "query.secure"
_LOST = (Exception, RunNotRunningException)  # the second one is a BaseException
_ROOM = 1 << 16  # maximum overhead of a letter in bytes; encryption adds 16 bytes per MiB
_BEHIND = "PolicyError: this site is behind a relay"
_OWN = re.compile(r"order-\d{1,16}-[0-9a-f]{8}\.relay")


@dataclass(frozen=True)
class _Open:
    """An order that is waiting for its reply. `message` has no content; `expires` is in seconds since 1970."""

    message: Message
    expires: float
    file: Path


class ServerEndpoint:
    """Replaces two functions of Flower's SuperNode. Raises ConfigError for unusable keys."""

    def __init__(self, settings: EndpointConfig, clock: Callable[[], float] = time.time) -> None:
        self._letters = PeerMessages(settings, REPLY, settings.replies)
        self._out, self._most, self._said = settings.orders, settings.most_bytes, settings.said
        self._log, self._clock = settings.state / NAME, clock
        self._open: dict[str, _Open] = {}
        self._ready: list[tuple[Message, float]] = []
        self._made, self._told = 0, dict[str, str]()
        before = audit_log.read_log(self._log) if self._log.exists() else []
        self._answered = {line["order"] for line in before if line["event"] == "imported"}
        for file in self._out.iterdir():
            if _OWN.fullmatch(file.name):  # from an earlier start, whose orders no longer count
                _remove(file)
                self._note("ended", {"file": file.name}, f"{file.name}: no reply: the relay has ended in the meantime")

    def install(self) -> None:
        """Replace Flower's two functions for the lifetime of the process."""
        module: Any = importlib.import_module("flwr.supernode.start_client_internal")
        module._pull_and_store_message, module._push_messages = self.look, self.push

    def look(self, **given: Any) -> int | None:
        """Replace Flower's `_pull_and_store_message`: export a message as a letter.

        Returns None if no reply is to be sent.
        """
        self._take_back(lambda order: order.expires <= self._clock(), "it has expired")
        try:
            if (received := given["receive"]()) is not None:
                self._export(*self._pulled(received, given))
        except _LOST as error:  # one message must not stop the site's other messages
            log(ERROR, "relay: a message was lost", exc_info=error)
            self._note("lost", {"reason": sanitize(f"{type(error).__name__}: {error}")}, f"a message was lost: {error}")
        self._collect()
        return 0 if self._ready else None

    def push(self, **given: Any) -> None:
        """Replace Flower's `_push_messages`: push the replies that have arrived in the folder."""
        while self._ready:
            message, seconds = self._ready.pop(0)
            try:
                self._send(message, seconds, given["send"], given["push_object"])
            except _LOST as error:
                log(ERROR, "relay: a reply was lost", exc_info=error)
                words = f"a reply to run {message.metadata.run_id} was lost, perhaps because the run has ended: {error}"
                self._note("lost", {"reason": sanitize(f"{type(error).__name__}: {error}")}, words)

    def end(self) -> None:
        """Withdraw the open orders, because the next start does not know them."""
        self._take_back(lambda _: True, "the relay ended")

    def _pulled(self, received: tuple[Message, Any], given: dict[str, Any]) -> tuple[Message, Run, Fab, int]:
        """Return the complete message, its run and bundle, and the total size of all three in bytes."""
        bare, tree = received
        run = given["get_run"](bare.metadata.run_id)
        fab = given["get_fab"](run.fab_hash, run.run_id)
        parts = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
        contents = pull_objects(parts, pull_object_fn=partial(given["pull_object"], run.run_id))
        size = sum(map(len, contents.values())) + len(fab.content)
        whole = inflate_object_from_contents(tree.object_id, contents)
        given["confirm_message_received"](run.run_id, bare.metadata.message_id)
        if not isinstance(whole, Message):
            raise StateError(f"expected a message, found {type(whole).__name__}")
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole, run, fab, size

    def _export(self, message: Message, run: Run, fab: Fab, size: int) -> None:
        bare = remove_content_from_message(message)
        if message.metadata.message_type == _QUESTION:
            self._refuse(bare, f"{_BEHIND}; secure aggregation waits for 120 s: leave this site out of such a run")
            return
        if (bytes_ := size * 65 // 64 + _ROOM) > self._most:
            self._refuse(bare, f"{_BEHIND}; an order of {bytes_:,} bytes exceeds its limit of {self._most:,}")
            return
        id_, order = os.urandom(16).hex(), self._order(message, run, fab)
        file = self._out / f"order-{order.made}-{id_[:8]}{SUFFIX}"
        try:
            write_atomic(file, encrypt_message(order.packed(), ORDER, id_, self._letters.own, self._letters.peer))
        except OSError as error:
            self._note("failed", {"reason": str(error)}, f"{file}: cannot be written: {error}; free some disk space")
            self._refuse(bare, "StateError at the site's relay; see the relay's log")
            return
        self._open[id_] = _Open(bare, order.expires / 1000, file)
        hours = max(0.0, order.expires / 1000 - self._clock()) / 3600
        words = f"{file.name}: order for run {run.run_id}; the server waits {hours:.1f} h for its reply"
        round_ = message.metadata.group_id.partition("/")[0]  # followed by the maximum size of a reply
        self._note("exported", {"order": id_, "run": str(run.run_id), "round": round_}, words)

    def _order(self, message: Message, run: Run, fab: Fab) -> RelayRequest:
        about = message.metadata
        # Always later than the previous order, even if the clock goes back: the site relies on this.
        self._made = max(int(about.created_at * 1000), self._made + 1)
        return RelayRequest(
            self._made, int((about.created_at + about.ttl) * 1000), about.dst_node_id,
            fab_to_proto(fab).SerializeToString(), message_to_proto(message).SerializeToString(),
            run_to_proto(run).SerializeToString(),
        )  # fmt: skip

    def _refuse(self, message: Message, reason: str) -> None:
        self._ready.append((Message(Error(_RAISED, reason), reply_to=message), 0.0))
        self._note("refused", {"reason": reason}, f"not exported: {reason}")

    def _collect(self) -> None:
        """Check the replies in the folder, and convert each one to a message from this process."""
        while (name := self._letters.next(self._tell)) is not None:
            self._told.clear()
            try:
                reply, order = self._judged(name)
            except DuplicateMessageError as error:
                self._said.say("known", f"{name}: {error}")
                continue
            except IncompleteMessageError as error:
                self._said.say("refused", str(error))
                continue
            except WireError as error:
                self._note("refused", {"file": name, "reason": str(error)}, str(error))
                continue
            del self._open[reply.order]
            self._answered.add(reply.order)
            _remove(order.file)
            self._ready.append((_message(reply, order.message), reply.seconds))
            self._note("imported", {"order": reply.order, "file": name}, f"{name}: accepted, passed to the server")

    def _judged(self, name: str) -> tuple[RelayReply, _Open]:
        """Return a reply and its order. Raises DuplicateMessageError, WireError."""
        head, content = self._letters.opened(name)
        reply = RelayReply.from_bytes(content)
        if head.id == reply.order and reply.order in self._answered:
            raise DuplicateMessageError("was already accepted")
        if head.id != reply.order or reply.order not in self._open:
            raise WireError(
                f"{name}: it answers no open order: the server is no longer waiting for it, or the relay was "
                "restarted; skip it"
            )
        return reply, self._open[reply.order]

    def _send(self, message: Message, seconds: float, send: Callable[..., Any], push: Callable[..., Any]) -> None:
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            parts, session = send(message, get_object_tree(message), seconds)
            contents = ((i, part.deflate()) for i, part in get_all_nested_objects(message).items() if i in parts)
            push_object_contents_from_iterable(contents, partial(push, message.metadata.run_id, session))

    def _take_back(self, which: Callable[[_Open], bool], why: str) -> None:
        for id_, order in [(id_, order) for id_, order in self._open.items() if which(order)]:
            del self._open[id_]
            _remove(order.file)
            self._note("ended", {"order": id_, "reason": why}, f"{order.file.name}: no reply: {why}")

    def _tell(self, what: str, words: str) -> None:
        """Report a status event unless it repeats the last one."""
        if self._told.get(what) != words:
            self._told[what] = words
            self._said.say(what, words)

    def _note(self, event: str, about: dict[str, Any], words: str) -> None:
        """Write a line to the log and a status event for users. Raises StateError if the log cannot be written."""
        audit_log.append_entry(self._log, event, about)
        self._said.say(event, words)


def _remove(file: Path) -> None:
    """Remove an order's file. If the carrier has put a folder in its place, the folder stays, and this is logged."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log(ERROR, "relay: %s cannot be removed: %s", file.name, error.strerror)


def _message(reply: RelayReply, to: Message) -> Message:
    """Create the relay's own message from the reply in a letter, in the form that the guard would have sent."""
    if reply.code:
        return Message(Error(reply.code, reply.reason), reply_to=to)
    slices = list(chunking.slice_message([reply.upload]))
    return replies.check_upload_reply(slices, reply.log, to, reply.signature_record)


def main(settings: str) -> None:
    """Run the process. It takes the arguments of Flower's own `flower-supernode`."""
    end = ServerEndpoint(EndpointConfig.of_text(settings))
    end.install()
    try:
        as_this_user()
    finally:
        end.end()
