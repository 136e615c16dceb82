"""Store replies on their way from a site to Flower, which learns of a reply only when it is complete and checked.

    PushMessages   checked (announcement.py), space is reserved, answered here; Flower does not see it
    PushObject     checked (object_form.py), written to the spool, answered here
    the last one   the reply is queued for Flower (hand_over.py)

Flower immediately registers every object id that a site announces, for all sites and runs. If a site announced the id
of an object that the server was about to send, but with different children, and never sent that object, the server's
own push would fail and the run would end.

Formal guarantees:
- Flower sees a reply only after every object in it has been checked against the announcement;
- the spool has space for the open replies of all sites at once: no two incomplete replies wait for each other;
- each site's largest open reply has reserved space, which no other site can take, no matter how many sites a member has
  registered; the second open replies of all sites share `MAX_SPOOL_BYTES`;
- for one instruction, a site sends at most `MAX_UPLOADS_OF_A_REPLY` times the maximum reply size;
- a reply is queued only once, even if several calls deliver its last object at the same time;
- the answers do not depend on Flower's store, so they do not reveal whether another site has an object.

| case | result |
|---|---|
| the announcement again, before the reply is complete | the same session, and the objects still missing |
| the announcement again, or an object again, after the reply is complete | success; nothing to push, "stored" |
| a different reply to the same instruction while the first is incomplete | replaces it: the site's client has died |
| a different reply after the first is complete | refused |
| a third open reply from a site | drops the site's oldest |
| no disk space, or no spool space for a second open reply | UNAVAILABLE, 503: the site asks again |
| an object from a reply that was dropped | refused, and not counted against the site (refusal_log.py) |
| no call for 300 s, run ended, instruction expired, key no longer registered | dropped by the sweep |
| the server is killed | complete replies are queued again; incomplete replies stay open in their old session |
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING
from typing import Any

from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse, Reconnect
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supercore import log
from sqlalchemy.exc import SQLAlchemyError

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announcement import Announcement, instruction_id_of, read_announcement
from fedveil.guard.fleet.hand_over import HandOver, WholeReply
from fedveil.guard.fleet.object_form import check_object
from fedveil.guard.fleet.refusal import DeferralReason, FleetCallDeferred, FleetCallRefused, RefusalReason
from fedveil.guard.fleet.spool import ReplySpool, SpooledReply
from fedveil.guard.flower import link_states

_RECONNECT_SECONDS = 5  # Flower's own value


@dataclass
class StagedReply:
    """An announced reply, guarded by its site's lock.

    Attributes:
        present: the objects in the spool.
        body_bytes: the total size of the objects in `present`.
        active_calls: the number of pushes that are being checked or written.
        is_whole: whether the reply is queued for Flower.
    """

    session: str
    announcement: Announcement
    last_call: float
    present: set[str] = field(default_factory=set)
    body_bytes: int = 0
    active_calls: int = 0
    is_whole: bool = False

    @property
    def missing(self) -> list[str]:
        """Return the objects that are still missing, in tree order."""
        return [object_id for object_id in self.announcement.tree.objects if object_id not in self.present]


@dataclass(frozen=True)
class FinishedReply:
    """A reply that Flower has accepted, stored to answer repeated calls from its site."""

    session: str
    announcement: Announcement


class ReplyStaging:
    """The open replies of all sites.

    Args:
        clock: returns the seconds since 1970.
        monotonic: returns the seconds of a clock that never jumps.
    """

    def __init__(
        self,
        spool: ReplySpool,
        hand_over: HandOver,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool, self._hand_over = spool, hand_over
        self._clock, self._monotonic = clock, monotonic
        self._open: dict[int, dict[str, StagedReply]] = defaultdict(dict)  # by site and session
        self._finished: dict[int, dict[str, FinishedReply]] = defaultdict(dict)
        self._dropped: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=limits.REMEMBERED_DROPPED_REPLIES))
        self._uploaded: dict[tuple[int, str], tuple[int, float]] = {}  # bytes, and when the instruction expires
        self._storage_errors: dict[tuple[int, str], tuple[int, float]] = {}  # count, and time of the last one
        self._locks: dict[int, threading.RLock] = defaultdict(threading.RLock)
        # Lock order: the site's lock, then the lock for disk space, then the lock for the data of all sites.
        self._room, self._all = threading.Lock(), threading.Lock()

    # Calls of a site

    def announce(self, request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
        """Answer PushMessages. Raises FleetCallRefused or FleetCallDeferred."""
        node_id, instruction_id = request.node.node_id, instruction_id_of(request)
        root = request.message_object_trees[0].object_id
        with self._lock_of(node_id), self._bounded_errors(node_id, root):
            if (known := self._answer_again(node_id, root)) is not None:
                return known
            row = link_states.find_instruction(state, instruction_id)
            announcement = read_announcement(request, row, self._clock(), node_id)
            if row is not None and row.reply_id:
                if row.reply_id != root:
                    raise FleetCallRefused(RefusalReason.ANSWERED, root)
                return _response(root, str(uuid.uuid4()), [])
            self._drop_replaced(announcement)
            with self._room:
                self._require_room(announcement)
                staged = self._add(str(uuid.uuid4()), announcement)
            return _response(root, staged.session, staged.missing)

    def push(self, request: PushObjectRequest) -> PushObjectResponse:
        """Answer PushObject. Raises FleetCallRefused."""
        node_id, object_id, content = request.node.node_id, request.object_id, request.object_content
        with self._lock_of(node_id):
            staged = self._session_of(request)
            if staged is None or object_id in staged.present or staged.is_whole:
                return PushObjectResponse(stored=True)
            self._count_upload(staged.announcement, len(content))
            staged.active_calls += 1
        try:
            with self._bounded_errors(node_id, staged.session):
                body_bytes = check_object(staged.announcement, object_id, content)
                self._write(staged, object_id, content)
                self._take(staged, object_id, body_bytes)
        finally:
            with self._lock_of(node_id):
                staged.active_calls -= 1
                staged.last_call = self._monotonic()
        return PushObjectResponse(stored=True)

    # Start and sweep

    def recover(self, state: Any) -> None:
        """Recover an earlier process's replies, and remove those that are no longer expected."""
        for spooled in self._spool.read_replies():
            with self._lock_of(spooled.node_id):
                if spooled.session in self._open[spooled.node_id]:
                    continue  # recovered in an earlier attempt that a database error ended
                announcement = self._judge_again(spooled, state)
                if announcement is None:
                    self._dropped[spooled.node_id].append(spooled.session)
                    self._spool.remove_reply(spooled.node_id, spooled.session)
                    continue
                staged = self._add(spooled.session, announcement, write=False)
                log(INFO, "resuming a reply of node %s: %s", spooled.node_id, spooled.session)
                for object_id in spooled.object_ids:
                    self._take_up(staged, object_id)
                self._queue_if_whole(staged)

    def sweep(self, state: Any, is_registered: Callable[[int], bool]) -> None:
        """Drop replies that are no longer expected or sent, and remove expired entries."""
        for staged in self._all_open():
            node_id = staged.announcement.node_id
            with self._lock_of(node_id):
                if not staged.is_whole and (why := self._why_drop(staged, state, is_registered)):
                    self._drop(staged, why)
        now = self._clock()
        for node_id in list(self._finished):
            with self._lock_of(node_id):
                kept = self._finished[node_id].items()
                self._finished[node_id] = {s: reply for s, reply in kept if reply.announcement.expires > now}
        with self._all:
            self._uploaded = {of: (count, end) for of, (count, end) in self._uploaded.items() if end > now}
            since, errors = self._monotonic() - limits.STORAGE_ERROR_SECONDS, self._storage_errors
            self._storage_errors = {of: (count, at) for of, (count, at) in errors.items() if at > since}

    def open_replies(self) -> int:
        """Return the number of replies that are open or being passed to Flower."""
        return len(self._all_open())

    # Helpers. Each caller holds the site's lock.

    def _answer_again(self, node_id: int, root: str) -> PushMessagesResponse | None:
        """Return the answer to a repeated announcement; None for a new one."""
        for staged in self._open[node_id].values():
            if staged.announcement.tree.root == root:
                staged.last_call = self._monotonic()
                return _response(root, staged.session, [] if staged.is_whole else staged.missing)
        for finished in self._finished[node_id].values():
            if finished.announcement.tree.root == root:
                return _response(root, finished.session, [])
        return None

    def _drop_replaced(self, announcement: Announcement) -> None:
        """Drop the reply that the site's new reply replaces. Raises FleetCallRefused."""
        own = self._open[announcement.node_id]
        finished = self._finished[announcement.node_id].values()
        if any(reply.announcement.instruction_id == announcement.instruction_id for reply in finished):
            raise FleetCallRefused(RefusalReason.ANSWERED, announcement.tree.root)
        for staged in list(own.values()):
            if staged.announcement.instruction_id == announcement.instruction_id:
                if staged.is_whole:
                    raise FleetCallRefused(RefusalReason.ANSWERED, announcement.tree.root)
                self._drop(staged, "the site has announced another reply")
        halves = sorted((staged for staged in own.values() if not staged.is_whole), key=lambda staged: staged.last_call)
        for staged in halves[: max(0, len(halves) + 1 - limits.MAX_OPEN_REPLIES)]:
            self._drop(staged, "the site has announced more than two replies")

    def _require_room(self, announcement: Announcement) -> None:
        """Raise FleetCallDeferred unless there is space for the whole reply.

        If space were reserved later, all sites could have partial replies and no space for the rest.
        """
        sizes: dict[int, list[int]] = {announcement.node_id: [announcement.max_bytes]}
        for staged in self._all_open():
            sizes.setdefault(staged.announcement.node_id, []).append(staged.announcement.max_bytes)
        shared = sum(sum(own) - max(own) for own in sizes.values())
        if len(sizes[announcement.node_id]) > 1 and shared > limits.MAX_SPOOL_BYTES:
            raise FleetCallDeferred(DeferralReason.NO_ROOM)
        if self._spool.free_bytes() < 2 * announcement.max_bytes:
            raise FleetCallDeferred(DeferralReason.NO_ROOM)

    def _add(self, session: str, announcement: Announcement, write: bool = True) -> StagedReply:
        if write:
            self._spool.add_reply(announcement.node_id, session, announcement.request)
        staged = StagedReply(session, announcement, self._monotonic())
        self._open[announcement.node_id][session] = staged
        return staged

    def _session_of(self, request: PushObjectRequest) -> StagedReply | None:
        """Return the reply that an object belongs to; None if the object is already stored. Raises FleetCallRefused."""
        node_id, session = request.node.node_id, request.session_id
        staged = self._open[node_id].get(session)
        known = staged or self._finished[node_id].get(session)
        if session in self._dropped[node_id]:
            raise FleetCallRefused(RefusalReason.DROPPED, session)
        if known is None or known.announcement.run_id != request.run_id:
            raise FleetCallRefused(RefusalReason.SESSION, session)
        if request.object_id not in known.announcement.tree.objects:
            raise FleetCallRefused(RefusalReason.NOT_ANNOUNCED, request.object_id)
        return staged

    def _count_upload(self, announcement: Announcement, count: int) -> None:
        """Count bytes for an instruction. Raises FleetCallRefused above the limit for all replies to it."""
        of = announcement.node_id, announcement.instruction_id
        with self._all:
            before = self._uploaded.get(of, (0, 0.0))[0]
            if before + count > limits.MAX_UPLOADS_OF_A_REPLY * announcement.max_bytes:
                raise FleetCallRefused(RefusalReason.UPLOADED_TOO_OFTEN, str(before + count))
            self._uploaded[of] = before + count, announcement.expires

    def _write(self, staged: StagedReply, object_id: str, content: bytes) -> None:
        """Write an object, unless its reply and folder have been removed meanwhile; `_take` handles that case."""
        node_id = staged.announcement.node_id
        try:
            self._spool.put_object(node_id, staged.session, object_id, content)
        except FileNotFoundError:
            with self._lock_of(node_id):
                if self._open[node_id].get(staged.session) is staged:
                    raise

    def _take(self, staged: StagedReply, object_id: str, body_bytes: int) -> None:
        """Count a written object. Raises FleetCallRefused."""
        node_id = staged.announcement.node_id
        with self._lock_of(node_id):
            if self._open[node_id].get(staged.session) is not staged:
                # The reply ended during the write, perhaps into a folder that was being removed.
                self._spool.remove_reply(node_id, staged.session)
                if staged.session in self._finished[node_id]:
                    return  # another call delivered this object, and Flower has the reply
                raise FleetCallRefused(RefusalReason.DROPPED, staged.session)
            if object_id in staged.present:
                return
            try:
                self._count_object(staged, object_id, body_bytes)
            except FleetCallRefused:
                self._spool.remove_object(node_id, staged.session, object_id)
                raise
            self._queue_if_whole(staged)

    def _queue_if_whole(self, staged: StagedReply) -> None:
        if staged.missing:
            return  # each object is counted once, so only one call finds no object missing
        staged.is_whole = True
        read = partial(self._spool.read_object, staged.announcement.node_id, staged.session)
        self._hand_over.add_reply(WholeReply(staged.announcement, read, partial(self._finish, staged)))

    def _finish(self, staged: StagedReply, flower_has_it: bool) -> None:
        """End a reply, in the hand-over thread."""
        node_id = staged.announcement.node_id
        with self._lock_of(node_id):
            del self._open[node_id][staged.session]
            if flower_has_it:
                self._finished[node_id][staged.session] = FinishedReply(staged.session, staged.announcement)
            else:
                self._dropped[node_id].append(staged.session)
            self._spool.remove_reply(node_id, staged.session)

    def _drop(self, staged: StagedReply, why: str) -> None:
        node_id = staged.announcement.node_id
        log(WARNING, "an incomplete reply of node %s is dropped: %s", node_id, why)
        del self._open[node_id][staged.session]
        self._dropped[node_id].append(staged.session)
        self._spool.remove_reply(node_id, staged.session)

    def _why_drop(self, staged: StagedReply, state: Any, is_registered: Callable[[int], bool]) -> str:
        announcement = staged.announcement
        if self._open[announcement.node_id].get(staged.session) is not staged:
            return ""  # the reply was removed meanwhile
        if not staged.active_calls and self._monotonic() - staged.last_call > limits.IDLE_SECONDS:
            return f"no object for {limits.IDLE_SECONDS:.0f} s"
        row = link_states.find_instruction(state, announcement.instruction_id)
        if row is None or row.expires <= self._clock():
            return "its instruction has ended"
        status = state.get_run_status({announcement.run_id}).get(announcement.run_id)
        if status is None or status.status == Status.FINISHED:
            return "its run has ended"
        return "" if is_registered(announcement.node_id) else "the site's key is no longer registered"

    def _judge_again(self, spooled: SpooledReply, state: Any) -> Announcement | None:
        """Return the announcement of a reply on disk; None if no instruction is waiting for the reply."""
        try:
            request = PushMessagesRequest.FromString(spooled.request)
            row = link_states.find_instruction(state, instruction_id_of(request))
            announcement = read_announcement(request, row, self._clock(), spooled.node_id)
        except (FleetCallRefused, ValueError) as error:  # protobuf's DecodeError is a ValueError
            log(WARNING, "a reply of node %s on the disk is removed: %s", spooled.node_id, error)
            return None
        # Flower accepts the same reply a second time, which completes a partial reply.
        return announcement if row is not None and row.reply_id in ("", announcement.tree.root) else None

    def _take_up(self, staged: StagedReply, object_id: str) -> None:
        """Check a file from an earlier process. Remove an invalid file and treat its object as not received."""
        node_id = staged.announcement.node_id
        try:
            content = self._spool.read_object(node_id, staged.session, object_id)
            self._count_object(staged, object_id, check_object(staged.announcement, object_id, content))
        except FleetCallRefused as refused:
            log(WARNING, "an object of node %s on the disk is removed: %s", node_id, refused)
            self._spool.remove_object(node_id, staged.session, object_id)

    @staticmethod
    def _count_object(staged: StagedReply, object_id: str, body_bytes: int) -> None:
        if staged.body_bytes + body_bytes > staged.announcement.max_bytes:
            raise FleetCallRefused(RefusalReason.REPLY_SIZE, str(staged.body_bytes + body_bytes))
        staged.present.add(object_id)
        staged.body_bytes += body_bytes

    def _lock_of(self, node_id: int) -> threading.RLock:
        with self._all:
            return self._locks[node_id]

    def _all_open(self) -> list[StagedReply]:
        with self._all:
            return [staged for own in list(self._open.values()) for staged in list(own.values())]

    @contextlib.contextmanager
    def _bounded_errors(self, node_id: int, of: str) -> Iterator[None]:
        """Return a context that passes on disk and database errors but, after ten for one reply, raises a refusal."""
        try:
            yield
        except (SQLAlchemyError, OSError) as error:
            with self._all:
                count = self._storage_errors.get((node_id, of), (0, 0.0))[0] + 1
                self._storage_errors[node_id, of] = count, self._monotonic()
            if count > limits.MAX_STORAGE_ERRORS:
                raise FleetCallRefused(RefusalReason.STORAGE, type(error).__name__) from error
            raise


def _response(root: str, session: str, missing: list[str]) -> PushMessagesResponse:
    return PushMessagesResponse(
        reconnect=Reconnect(reconnect=_RECONNECT_SECONDS), results={root: 0}, objects_to_push=missing,
        session_id=session,
    )  # fmt: skip
