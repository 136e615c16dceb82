"""Ask sites and receive their replies: the only place that pushes instructions or reads replies.

Only the table of open requests decides which site a reply belongs to: a message counts for a site if it answers a
message that was sent to this site's node, and comes from that node. The contents of a reply never influence this
decision.

| message | outcome |
|---|---|
| the reply to an open request, from the node that was asked | `ArrivedReply`, or `LostReply` for an error |
| such a reply, but it cannot be read | `RefusedReply`; the text of an unexpected error is in the server's log |
| an error that the SuperLink itself created for an open request | `LostReply` |
| an instruction that the SuperLink rejected, or a site that must not be asked (message_signing.py) | `LostReply` |
| the reply to a signed instruction, without its site's signature | `RefusedReply` |
| a reply whose objects have not all arrived | none yet; it is read again after 0.5, 1, 2 .. 60 s |
| not a reply, from another node, or a second reply | dropped; an audit-log line, at most 20 per reception |
| a reply after `close_requests` | dropped by `close` without a log line, because its site was merely late |

Only an unresponsive SuperLink (`UnreachableError`) and a stopped run leave this module as exceptions.

Without a `MessageSigner`, neither instructions nor replies are signed. Then only the SuperLink vouches for the site
that a reply belongs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, Self, final

from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore import log

from fedveil.contract.codec import Buffer
from fedveil.errors import StateError, UnreachableError, WireError
from fedveil.federation.message_signatures.claims import InstructionClaims
from fedveil.sanitize import sanitize
from fedveil.server_app.message_signing import MessageSigner
from fedveil.server_app.object_reader import IncompleteReplyError, LostObjectError
from fedveil.server_app.reply_content import ReplyContent, ReplyError
from fedveil.server_app.reply_sources import MessageReader, ReplyHead, ReplySource, open_reply_source

MAX_DROPPED_LINES = 20
_NOT_TAKEN = "the SuperLink did not accept the message to it"
_OBJECT_LOST = 3  # Flower's ErrorCode.MESSAGE_UNAVAILABLE, which its own grid returns for a lost reply
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds between two attempts to read an incomplete reply
_MAX_TEXT = 80  # characters of untrusted text in an audit-log line


@dataclass(frozen=True)
class ArrivedReply:
    """A reply with an upload. Only its format has been checked.

    Attributes:
        site_log: the head of the site's audit log; "" if the reply has none.
        signed: the reply's verified claims, with key and signature; {} if the site does not sign.
    """

    site: str
    data: Buffer
    site_log: str
    signed: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class LostReply:
    """There is no reply, or one with an error.

    Attributes:
        code: Flower's ErrorCode; 0 if the message was never sent.
        reason: the reason given by the sender.
    """

    site: str
    code: int
    reason: str


@dataclass(frozen=True)
class RefusedReply:
    """A reply that the server refuses, because its content is not a valid reply.

    Attributes:
        reason: the field and what is wrong with it, or the type of an unexpected error.
        received_bytes: number of slice bytes read so far.
    """

    site: str
    reason: str
    received_bytes: int


ReplyOutcome = ArrivedReply | LostReply | RefusedReply


@dataclass(frozen=True)
class _OpenRequest:
    site: str
    node_id: int
    max_bytes: int
    signed: InstructionClaims | None


@dataclass
class _IncompleteReply:
    """A reply whose objects have not all arrived, and the time to read it again."""

    head: ReplyHead
    due: float
    pause: float


@final
class Reception:
    """The requests of one attempt at a round, and their replies.

    Args:
        source: the route to the sites.
        folder: folder that stores a long upload until it is processed, or None to keep it in memory.
        note_dropped: records a dropped message.
        signer: signs the instructions and verifies the replies, or None to sign nothing.
    """

    def __init__(
        self,
        source: ReplySource,
        folder: Path | None,
        note_dropped: Callable[[Mapping[str, Any]], object],
        signer: MessageSigner | None = None,
    ) -> None:
        self._source, self._folder, self._note_dropped, self._signer = source, folder, note_dropped, signer
        self._open: dict[str, _OpenRequest] = {}  # by message id
        self._closed: list[str] = []
        self._not_taken: list[LostReply] = []
        self._incomplete: dict[str, _IncompleteReply] = {}
        self._dropped = 0

    @classmethod
    def from_grid(
        cls,
        grid: Grid,
        folder: Path | None,
        note_dropped: Callable[[Mapping[str, Any]], object],
        signer: MessageSigner | None = None,
    ) -> Self:
        """Return the reception for a grid's sites."""
        return cls(open_reply_source(grid), folder, note_dropped, signer)

    def ask(self, messages: Mapping[str, Message], max_bytes: int) -> None:
        """Send each site its message. A reply's upload may have at most `max_bytes`."""
        signed = self._sign(messages)
        nodes = {site: messages[site].metadata.dst_node_id for site in signed}
        ids = self._source.push_requests([messages[site] for site in signed])
        for (site, node_id), message_id in zip(nodes.items(), ids, strict=True):
            if message_id:
                self._open[message_id] = _OpenRequest(site, node_id, max_bytes, signed[site])
            else:
                self._not_taken.append(LostReply(site, 0, _NOT_TAKEN))

    def _sign(self, messages: Mapping[str, Message]) -> dict[str, InstructionClaims | None]:
        """Sign the messages. Return the claims for each site that is asked; None if its message is unsigned."""
        if self._signer is None:
            return dict.fromkeys(messages)
        signed: dict[str, InstructionClaims | None] = {}
        contents: dict[int, str] = {}
        for site, message in messages.items():
            try:
                signed[site] = self._signer.sign(site, message, contents)
            except (StateError, WireError) as error:
                self._not_taken.append(LostReply(site, 0, str(error)))
        return signed

    def poll_replies(self, only: str = "") -> Iterator[ReplyOutcome]:
        """Poll once for the reply to each open request, or only to the site `only`'s request. Yield the outcomes as
        they are read, with one reply in memory at a time. Each `ask` gives one outcome per site.

        Raises:
            UnreachableError: the SuperLink has not answered for two minutes.
        """
        for lost in [lost for lost in self._not_taken if only in ("", lost.site)]:
            self._not_taken.remove(lost)
            yield lost
        now = time.monotonic()
        for reply in [reply for reply in self._incomplete.values() if reply.due <= now]:
            if only in ("", self._open[reply.head.reply_to].site):
                yield from self._receive(reply.head)
        wanted = [id_ for id_, request in self._open.items() if only in ("", request.site)]
        wanted = [id_ for id_ in wanted if id_ not in self._incomplete]
        for start in range(0, len(wanted), self._source.batch_size):
            yield from self._poll_batch(wanted[start : start + self._source.batch_size])

    def close_requests(self) -> list[str]:
        """Stop waiting. Return the sites that have not replied; anything they still send is dropped."""
        sites = [lost.site for lost in self._not_taken] + [request.site for request in self._open.values()]
        self._closed += self._open
        self._open.clear()
        self._not_taken.clear()
        for reply in self._incomplete.values():
            self._source.discard_message(reply.head)
        self._incomplete.clear()
        return sites

    def close_request(self, site: str) -> None:
        """Stop waiting for one site; anything it still sends is dropped."""
        self._not_taken = [lost for lost in self._not_taken if lost.site != site]
        for message_id in [id_ for id_, request in self._open.items() if request.site == site]:
            del self._open[message_id]
            self._closed.append(message_id)
            if (reply := self._incomplete.pop(message_id, None)) is not None:
                self._source.discard_message(reply.head)

    def close(self) -> None:
        """Remove late replies from the SuperLink's disk. Replies that arrive even later are removed with the run."""
        self.close_requests()
        for start in range(0, len(self._closed), self._source.batch_size):
            try:
                for head in self._source.pull_heads(self._closed[start : start + self._source.batch_size]):
                    self._source.discard_message(head)
            except Exception as error:  # the round does not depend on this
                log(WARNING, "late replies stay on the SuperLink: %s", error)
                break
        self._closed.clear()
        if self._dropped > MAX_DROPPED_LINES:
            self._note_dropped({"messages": self._dropped - MAX_DROPPED_LINES})
        self._dropped = 0

    def _poll_batch(self, message_ids: Sequence[str]) -> Iterator[ReplyOutcome]:
        """Yield the outcomes that have arrived, in the order of their requests."""
        try:
            heads = self._source.pull_heads(message_ids)
        except UnreachableError:
            raise
        except Exception as error:  # from a message grid, which is asked for one reply at a time
            if len(message_ids) != 1:
                raise
            site = self._open.pop(message_ids[0]).site
            log(ERROR, "fetching the reply from %s failed", site, exc_info=error)
            yield RefusedReply(site, type(error).__name__, 0)
            return
        order = {message_id: place for place, message_id in enumerate(message_ids)}
        for head in sorted(heads, key=lambda head: order.get(head.reply_to, len(order))):
            yield from self._receive(head)

    def _receive(self, head: ReplyHead) -> Iterator[ReplyOutcome]:
        request = self._open.get(head.reply_to)
        is_answer = request is not None and (
            head.node_id == request.node_id or (head.node_id == SUPERLINK_NODE_ID and head.is_error)
        )
        if request is None or not is_answer:
            self._drop(head)
            return
        if (outcome := self._read_reply(head, request)) is None:
            return
        del self._open[head.reply_to]
        self._incomplete.pop(head.reply_to, None)
        self._source.discard_message(head)
        yield outcome

    def _read_reply(self, head: ReplyHead, request: _OpenRequest) -> ReplyOutcome | None:
        """Return a reply's outcome; None if its objects have not all arrived."""
        reader = self._source.open_reader(head, request.max_bytes, self._folder)
        try:
            content = reader.read_content()
            if isinstance(content, ReplyError):
                return LostReply(request.site, content.code, content.reason)
            return self._verified(content, request)
        except UnreachableError:
            raise
        except IncompleteReplyError:
            self._wait_for_objects(head)
            return None
        except LostObjectError as error:
            return LostReply(request.site, _OBJECT_LOST, str(error))
        except WireError as error:
            return RefusedReply(request.site, str(error), reader.received_bytes)
        except Exception as error:  # one bad reply must not end the round for the other sites
            log(ERROR, "reading the reply from %s failed", request.site, exc_info=error)
            return RefusedReply(request.site, type(error).__name__, reader.received_bytes)

    def _verified(self, content: ReplyContent, request: _OpenRequest) -> ArrivedReply:
        """Return the upload with its verified signature. Raises WireError for an invalid signature."""
        if self._signer is None:
            return ArrivedReply(request.site, content.data, content.site_log)
        signed = self._signer.verify(
            request.site, request.node_id, request.signed, content.data, content.site_log, content.signature
        )
        return ArrivedReply(request.site, content.data, content.site_log, signed)

    def _wait_for_objects(self, head: ReplyHead) -> None:
        """Read a reply again later. The SuperLink has delivered it and will not announce it a second time."""
        before = self._incomplete.get(head.reply_to)
        pause = min(2 * before.pause, _LONGEST_PAUSE) if before else _FIRST_PAUSE
        self._incomplete[head.reply_to] = _IncompleteReply(head, time.monotonic() + pause, pause)

    def drop_outcome(self, outcome: ReplyOutcome) -> None:
        """Record a reply that the caller no longer waits for."""
        self._note_drop({"site": outcome.site}, f"a reply from {outcome.site}, which has no open request")

    def _drop(self, head: ReplyHead) -> None:
        """Record a message that does not answer any request, and remove it from the SuperLink's disk."""
        if head.message_id not in self._open:
            self._source.discard_message(head)
        about = {"node": str(head.node_id), "answers": sanitize(head.reply_to, _MAX_TEXT)}
        self._note_drop(about, f"a message from node {head.node_id} that does not answer an open request")

    def _note_drop(self, about: Mapping[str, str], what: str) -> None:
        self._dropped += 1
        if self._dropped <= MAX_DROPPED_LINES:
            self._note_dropped({"messages": 1, **about})
            log(WARNING, "dropped %s", what)


def read_given_reply(reply: Message, site: str, max_bytes: int, folder: Path | None) -> ReplyOutcome:
    """Return the outcome of a reply that the caller's own loop received, treated as a reply from `site`."""
    reader = MessageReader(reply, max_bytes, folder)
    try:
        content = reader.read_content()
    except WireError as error:
        return RefusedReply(site, str(error), reader.received_bytes)
    except Exception as error:
        log(ERROR, "reading the reply from %s failed", site, exc_info=error)
        return RefusedReply(site, type(error).__name__, reader.received_bytes)
    if isinstance(content, ReplyError):
        return LostReply(site, content.code, content.reason)
    return ArrivedReply(site, content.data, content.site_log)
