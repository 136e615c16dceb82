"""The two routes to a site: Flower's runtime port, and a grid that delivers whole messages (a simulation).

Only this module calls `push_messages` and `pull_messages` on a grid or its runtime client, and only reception.py
imports it.

| | runtime port | message grid |
|---|---|---|
| used for | `HttpGrid`, in a deployment | any other `Grid`: a simulation, or a program that replaces the sites |
| a reply is read | object by object (object_reader.py) | from Flower's `Message`: one trust domain |
| ids per request | 32: with 1, a thousand sites would cause 4,000 requests per second | 1: it returns the reply |
| after reading or dropping | the SuperLink is asked to remove the objects | nothing: the grid stores no objects |

| if the runtime port ... | result |
|---|---|
| refuses connections, is slow, or answers 503 or 504 | Flower's client retries without limit |
| answers a message pull with a different error status | retried, with each id separately |
| answers every other request with an error status, too | `UnreachableError` after 120 s |
| answers the request for one object with an error status | retried twice, then it counts as a fault of the reply |
| reports that the run was stopped | Flower's own exception, which ends the run |
| answers with more bytes than an object can have | refused before the bytes are read |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol, final

from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import GetNodesRequest, PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore import log

from fedveil.errors import UnreachableError, WireError
from fedveil.server_app import upload_validation
from fedveil.server_app.object_reader import IncompleteReplyError, LostObjectError, ObjectReader
from fedveil.server_app.reply_content import ReplyContent, ReplyError, parse_log_head

UNREACHABLE_SECONDS = 120.0
MAX_OBJECT_RESPONSE_BYTES = 8 << 20  # a slice has 1.3 MB, and the names of 2,040 slices take 0.5 MB
_STATUS_PAUSES = (0.5, 1.0)  # seconds before an object is requested again
_UNREACHABLE_PAUSE = 5.0  # maximum seconds between two attempts
_PULL_OBJECT_PATH = "/v1/runtime/pull-object"


@dataclass(frozen=True)
class ReplyHead:
    """The announcement of a received message, before any of its content is read.

    Attributes:
        reply_to: id of the instruction that it claims to answer; "" if it is not a reply.
        node_id: node of the sender, checked by Flower.
        is_error: true if it explains why the site or the SuperLink has no reply.
        handle: for use by the source that delivered the message.
    """

    message_id: str
    reply_to: str
    node_id: int
    is_error: bool
    handle: Any


class ReplyReader(Protocol):
    """Reads one reply."""

    @property
    def received_bytes(self) -> int:
        """Return the number of slice bytes read so far."""
        ...

    def read_content(self) -> ReplyContent | ReplyError:
        """Return the content of the reply. Raises any error that reading untrusted bytes can cause."""
        ...


class ReplySource(Protocol):
    """A route that carries messages to sites and replies back."""

    @property
    def batch_size(self) -> int:
        """Return the number of ids to pass to one `pull_heads` call."""
        ...

    def push_requests(self, messages: list[Message]) -> list[str]:
        """Send messages. Return their ids in order, "" for one that was not accepted."""
        ...

    def pull_heads(self, message_ids: Sequence[str]) -> list[ReplyHead]:
        """Return received messages: replies to these ids, and unsolicited messages to the ServerApp."""
        ...

    def open_reader(self, head: ReplyHead, max_bytes: int, folder: Path | None) -> ReplyReader:
        """Return a reader for a reply of at most `max_bytes`. `folder` is for a long upload."""
        ...

    def discard_message(self, head: ReplyHead) -> None:
        """Drop a message, read or not."""
        ...


def open_reply_source(grid: Grid) -> ReplySource:
    """Return the route to a grid's sites."""
    return RuntimePortSource(grid) if hasattr(type(grid), "_runtime_client") else MessageGridSource(grid)


@final
class MessageGridSource:
    """A grid that delivers whole messages."""

    batch_size = 1

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def push_requests(self, messages: list[Message]) -> list[str]:
        """Send messages. Return their ids in order, "" for one that was not accepted."""
        return _pushed_ids(self._grid, messages)

    def pull_heads(self, message_ids: Sequence[str]) -> list[ReplyHead]:
        """Return the received messages."""
        return [_head_of_message(message) for message in self._grid.pull_messages(list(message_ids))]

    def open_reader(self, head: ReplyHead, max_bytes: int, folder: Path | None) -> ReplyReader:
        """Return the reader of a reply."""
        return MessageReader(head.handle, max_bytes, folder)

    def discard_message(self, head: ReplyHead) -> None:
        """Do nothing: the grid does not store delivered messages."""


@final
class MessageReader:
    """Reads a reply from Flower's `Message`. Removes its slices while reading."""

    def __init__(self, message: Message, max_bytes: int, folder: Path | None) -> None:
        self._message, self._max_bytes, self._folder = message, max_bytes, folder
        self.received_bytes = 0

    def read_content(self) -> ReplyContent | ReplyError:
        """Return the content of the reply. Raises WireError, StateError."""
        message = self._message
        if message.has_error():
            return ReplyError(message.error.code, message.error.reason or "")
        self.received_bytes = upload_validation.sent_bytes(message)
        data = upload_validation.message_bytes(message, self._max_bytes, self._folder)
        log_record = message.content.config_records.get("log")
        signature = message.content.config_records.get("signature")
        site_log = parse_log_head(log_record.get("head")) if log_record else ""
        return ReplyContent(data, site_log, None if signature is None else dict(signature))


@final
class RuntimePortSource:
    """The runtime port of a SuperLink, through the client of Flower's `HttpGrid`."""

    batch_size = 32

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._node = Node(node_id=SUPERLINK_NODE_ID)
        self._unanswered_since: float | None = None

    def push_requests(self, messages: list[Message]) -> list[str]:
        """Send messages. Return their ids in order, "" for one that was not accepted."""
        return _pushed_ids(self._grid, messages)

    def pull_heads(self, message_ids: Sequence[str]) -> list[ReplyHead]:
        """Return the received messages. Raises UnreachableError."""
        try:
            answer = self._client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        except Exception as error:
            self._note_failure(error)
            if len(message_ids) == 1:
                return []
            return [head for message_id in message_ids for head in self.pull_heads([message_id])]
        self._unanswered_since = None
        return [_head_of_announced(message) for message in answer.messages_list]

    def open_reader(self, head: ReplyHead, max_bytes: int, folder: Path | None) -> ReplyReader:
        """Return the reader of a reply."""
        return _RuntimeReader(ObjectReader(self._pull_object, max_bytes, folder), head)

    def discard_message(self, head: ReplyHead) -> None:
        """Tell the SuperLink that a message was received, so that it removes the objects."""
        request = ConfirmMessageReceivedRequest(
            node=self._node, run_id=self._grid.run.run_id, message_object_id=head.message_id
        )
        try:
            self._client.ConfirmMessageReceived(request)
        except Exception as error:  # the objects stay until the run ends, which does not affect any round
            log(WARNING, "cannot remove a reply's objects from the SuperLink; they stay until the run ends: %s", error)

    @property
    def _client(self) -> Any:
        client = self._grid._runtime_client
        _bound_responses(getattr(client, "_client", None))
        return client

    def _note_failure(self, error: Exception) -> None:
        """Wait before the next attempt. Raises UnreachableError after 120 s without an answer."""
        if self._answers_otherwise():  # then only this reply fails; otherwise its site could end the run
            self._unanswered_since = None
            log(WARNING, "the SuperLink gave an error instead of saying whether a reply has arrived: %s", error)
            return
        now = time.monotonic()
        self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
        failing = now - self._unanswered_since
        log(WARNING, "the SuperLink gave an error instead of saying which replies have arrived: %s", error)
        if failing > UNREACHABLE_SECONDS:
            raise self._unreachable(error) from error
        time.sleep(min(0.1 + failing / 4, _UNREACHABLE_PAUSE))

    def _answers_otherwise(self) -> bool:
        """Return whether the port answers a request that does not involve a site."""
        try:
            self._client.GetNodes(GetNodesRequest())
        except Exception:
            return False
        return True

    @staticmethod
    def _unreachable(error: Exception) -> UnreachableError:
        return UnreachableError(
            f"SuperLink: its runtime port has not answered for {UNREACHABLE_SECONDS:g} s ({error}); "
            "restart it, then resume the run"
        )

    def _pull_object(self, object_id: str) -> bytes:
        """Return an object's bytes. Raises IncompleteReplyError, LostObjectError, WireError."""
        request = PullObjectRequest(node=self._node, run_id=self._grid.run.run_id, object_id=object_id)
        answer = self._ask_for_object(request)
        if not answer.object_found:
            raise LostObjectError("reply: the SuperLink no longer has one of its objects")
        if not answer.object_available:
            raise IncompleteReplyError("reply: one of its objects has not arrived yet")
        return bytes(answer.object_content)

    def _ask_for_object(self, request: PullObjectRequest) -> Any:
        """Return the response. An error status may be due to this object, and is raised on the third attempt."""
        pauses, end = iter(_STATUS_PAUSES), time.monotonic() + UNREACHABLE_SECONDS
        while True:
            try:
                return self._client.PullObject(request)
            except (WireError, MemoryError):
                raise
            except Exception as error:
                is_answer = _has_status(error)
                if (pause := next(pauses, None) if is_answer else _UNREACHABLE_PAUSE) is None:
                    raise
                if time.monotonic() > end:
                    raise self._unreachable(error) from error
                time.sleep(pause)


@final
class _RuntimeReader:
    """Reads a reply from the runtime port. An error created by the SuperLink has no objects to read."""

    def __init__(self, reader: ObjectReader, head: ReplyHead) -> None:
        self._reader, self._head = reader, head

    @property
    def received_bytes(self) -> int:
        return self._reader.received_bytes

    def read_content(self) -> ReplyContent | ReplyError:
        announced: ProtoMessage = self._head.handle
        if self._head.node_id == SUPERLINK_NODE_ID:
            return ReplyError(announced.error.code, announced.error.reason)
        return self._reader.read_content(announced)


def _pushed_ids(grid: Grid, messages: list[Message]) -> list[str]:
    ids = list(grid.push_messages(messages))
    # Flower's grids return fewer ids if the SuperLink accepted no messages, or not all messages of a simulation.
    return [id_ or "" for id_ in ids] if len(ids) == len(messages) else [""] * len(messages)


def _head_of_message(message: Message) -> ReplyHead:
    about = message.metadata
    return ReplyHead(about.message_id, about.reply_to_message_id, about.src_node_id, message.has_error(), message)


def _head_of_announced(message: ProtoMessage) -> ReplyHead:
    about = message.metadata
    is_error = message.HasField("error")
    return ReplyHead(about.message_id, about.reply_to_message_id, about.src_node_id, is_error, message)


def _has_status(error: Exception) -> bool:
    """Return whether an error from Flower's client is a response with an error status."""
    return hasattr(getattr(error, "response", None), "status_code")


def _bound_responses(http_client: Any) -> None:
    """Make Flower's HTTP client refuse an object that is too long before reading it."""
    hooks = getattr(http_client, "event_hooks", None)
    if hooks is not None and _refuse_long_object not in hooks["response"]:
        http_client.event_hooks = {**hooks, "response": [*hooks["response"], _refuse_long_object]}


def _refuse_long_object(response: Any) -> None:
    """Raise WireError for an object above the size limit. httpx calls this before it reads the response."""
    if not response.request.url.path.endswith(_PULL_OBJECT_PATH) or response.status_code != 200:
        return
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_OBJECT_RESPONSE_BYTES:
        raise WireError(f"reply: an object has {length[:20]} bytes, above the limit of {MAX_OBJECT_RESPONSE_BYTES}")
