"""One thread that passes complete replies to Flower: `push_messages`, then `push_object` for each object.

It handles one object per site in turn, so that one site's gigabyte does not delay other sites' kilobytes.

Formal guarantees:
- Flower learns of a reply only when all objects of the reply are present and have been checked;
- no exception ends the thread, and each reply leaves the thread once: handed over, or dropped with a log line.

| case | result |
|---|---|
| the run has ended, or the instruction was withdrawn | dropped: Flower accepts no part of it |
| the database is locked, the disk fails, or Flower's session is over | restarted after a pause, up to ten times |
| it still fails after that | dropped |
| this process is killed | queued again at the next start; Flower accepts the same message twice |
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from typing import Any, Protocol

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore import log
from flwr.supercore.error import FlowerError
from flwr.supercore.run import InvalidRunStatusException

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announcement import Announcement

_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 5.0


class FlowerPushes(Protocol):
    """Flower's two push functions, bound to Flower's state."""

    def push_messages(self, request: PushMessagesRequest) -> Any:
        """Announce a reply."""

    def push_object(self, request: PushObjectRequest) -> Any:
        """Store one object of a reply."""


@dataclass
class WholeReply:
    """A complete reply waiting to be passed to Flower.

    Attributes:
        read_object: returns the bytes of an object. Raises OSError.
        finish: called once, with True if Flower accepted the reply and False otherwise.
    """

    announcement: Announcement
    read_object: Callable[[str], bytes]
    finish: Callable[[bool], None]
    tries: int = 0
    not_before: float = 0.0
    flower_session: str = ""
    missing: deque[str] | None = field(default=None)


class ReplyNotStoredError(Exception):
    """Raised when Flower did not store an object that it had requested."""


class HandOver:
    """The hand-over thread and its queue."""

    def __init__(self, flower: FlowerPushes, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._flower, self._monotonic = flower, monotonic
        self._queues: OrderedDict[int, deque[WholeReply]] = OrderedDict()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add_reply(self, reply: WholeReply) -> None:
        """Queue a reply after the site's other replies."""
        with self._changed:
            self._queues.setdefault(reply.announcement.node_id, deque()).append(reply)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fedveil-hand-over", daemon=True)
                self._thread.start()
            self._changed.notify()

    def is_idle(self) -> bool:
        """Return whether no reply is queued or in progress."""
        with self._changed:
            return not self._queues

    def step(self) -> float:
        """Make one call to Flower. Return the seconds until the next call is due, or infinity for an empty queue."""
        with self._changed:
            now = self._monotonic()
            due = [node for node, queue in self._queues.items() if queue[0].not_before <= now]
            if not due:
                return min((queue[0].not_before - now for queue in self._queues.values()), default=float("inf"))
            self._queues.move_to_end(due[0])
            reply = self._queues[due[0]][0]
        try:
            outcome = self._advance(reply)
        except (FlowerError, InvalidRunStatusException) as error:  # the run has ended; the second is a BaseException
            log(WARNING, "a reply of node %s is dropped: %s", reply.announcement.node_id, error)
            outcome = False
        except Exception as error:
            outcome = self._after_failure(reply, error)
        if outcome is not None:
            self._leave(reply, outcome)
        return 0.0

    def _advance(self, reply: WholeReply) -> bool | None:
        """Return whether Flower has the reply; None while the hand-over is not finished."""
        announcement = reply.announcement
        if reply.missing is None:
            answer = self._flower.push_messages(PushMessagesRequest.FromString(announcement.request))
            reply.flower_session, reply.missing = answer.session_id, deque(answer.objects_to_push)
        elif reply.missing:
            object_id = reply.missing[0]
            request = PushObjectRequest(
                node=Node(node_id=announcement.node_id), run_id=announcement.run_id, object_id=object_id,
                session_id=reply.flower_session, object_content=reply.read_object(object_id),
            )  # fmt: skip
            if not self._flower.push_object(request).stored:
                raise ReplyNotStoredError(object_id)
            reply.missing.popleft()
        return True if not reply.missing else None

    def _after_failure(self, reply: WholeReply, error: Exception) -> bool | None:
        reply.tries += 1
        log(
            ERROR,
            "handing over a reply of node %s failed, try %s",
            reply.announcement.node_id,
            reply.tries,
            exc_info=error,
        )
        if reply.tries >= limits.MAX_HAND_OVER_TRIES:
            log(ERROR, "a reply of node %s is dropped", reply.announcement.node_id)
            return False
        pause = min(_FIRST_PAUSE_SECONDS * 2**reply.tries, _MAX_PAUSE_SECONDS)
        reply.missing, reply.not_before = None, self._monotonic() + pause
        return None

    def _leave(self, reply: WholeReply, has_it: bool) -> None:
        try:
            reply.finish(has_it)
        except Exception as error:  # the reply's files stay until the next start; other sites' replies continue
            log(ERROR, "finishing a reply of node %s failed", reply.announcement.node_id, exc_info=error)
        with self._changed:
            queue = self._queues[reply.announcement.node_id]
            queue.popleft()
            if not queue:
                del self._queues[reply.announcement.node_id]
            self._changed.notify()

    def _run(self) -> None:
        while True:
            seconds = self.step()
            if seconds:
                with self._changed:
                    self._changed.wait(min(seconds, _MAX_PAUSE_SECONDS))
