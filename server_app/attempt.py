"""One attempt at a round: it sends messages, takes replies, and records each of them.

| a site ... | its entry in `record.failed` |
|---|---|
| does not answer by the deadline | "no reply within 900 s" |
| loses its client process, its SuperNode or its reply | what that means, in place of Flower's words |
| loses its worker, twice in a turn | "WorkerError: the site's worker ended: out of memory", or what else ended it |
| raises | the kind of its error; the text stays in the site's log |
| sends what the envelope or the intake gate refuses | "refused: " field, expected, found |
| sends what makes this server's own code fail | "refused: " the kind of the error; its text is in the server's log |
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from logging import ERROR, WARNING
from typing import Any

import xxhash
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Direction
from fedveil.contract.method import RoundContext, State, Upload, fields_of
from fedveil.errors import StateError, UploadRefused, WireError
from fedveil.federation.exchange import Exchange
from fedveil.foreign import shown
from fedveil.records.audit_log import Head
from fedveil.server_app import intake
from fedveil.server_app.record import RoundRecord, RunFolder
from fedveil.wire import envelope, slices
from fedveil.wire.tap import Tap

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 60.0  # a message outlives its round, so that the round says who was late and not Flower
REASON_CHARACTERS = 300
_FEWEST_FOR_A_MEDIAN = 3
_LOST = {  # by Flower's ErrorCode
    3: "its message was lost before all of it had come: the site ended while it sent, or was removed from the "
    "federation, or the SuperLink's state was",
    4: "its reply was lost, or came too late",
    5: "its SuperNode has shown no sign of life for a minute: its machine, its network or the process is gone",
    8: "its client process (flwr-clientapp) ended without a word: killed, perhaps for want of memory; see its log",
}


@dataclasses.dataclass(frozen=True)
class _Judged:
    """What the records say of an upload that passed the gate. `data` is kept for a tap only."""

    data: Buffer
    sent: int
    disclosed: Mapping[str, Any]
    site_log: str
    variant: str
    norm: float


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt, with what it needs.

    Attributes:
        exchange: the method on its spec.
        server: the state that is broadcast.
        record: filled in while the attempt runs.
        limits: of the intake gate.
        run: name under which sites keep their private state.
        folder, tap: where messages are recorded; None records nothing.
        last: each site's last turn whose upload is in `server`.
        norm_factor: as cohort.norm-factor. If it is not 0, `within` decides on the uploads that passed the gate.
        undecided: uploads that passed the gate, by site, until `within` has decided on them.
        turns: of each upload that passed the gate, by site; filled in while the attempt runs.
    """

    exchange: Exchange
    server: State
    record: RoundRecord
    limits: intake.Limits
    run: str
    folder: RunFolder | None
    tap: Tap | None
    last: Mapping[str, str] = dataclasses.field(default_factory=dict)
    norm_factor: float = 0.0
    undecided: dict[str, _Judged] = dataclasses.field(default_factory=dict)
    turns: dict[str, str] = dataclasses.field(default_factory=dict)

    def messages(
        self, contexts: list[RoundContext], nodes: dict[str, int], deadline: float, config: ConfigRecord
    ) -> list[Message]:
        """One message for each context. Equal messages share one array object, which Flower uploads once."""
        ttl = deadline + _GRACE_SECONDS
        messages, shared = [], Shared()
        for ctx in contexts:
            message = self.exchange.packed(self.server, ctx)
            self.record.download_bytes += message.disclosed["bytes"]
            anchor = self._noted(message.disclosed, ctx, "down", "sent")
            if self.tap:
                self._tapped(b"".join(message.parts), ctx, "down")
            record = shared.record(message.parts)
            content = RecordDict({"fedveil": record, "order": self.order(ctx, anchor, deadline), "config": config})
            messages.append(Message(content, nodes[ctx.client], MessageType.TRAIN, ttl=ttl, group_id=str(ctx.round)))
        return messages

    def order(self, ctx: RoundContext, anchor: str, deadline: float) -> ConfigRecord:
        """What a site is asked beside a message."""
        return order_of(self.exchange, self.run, ctx, deadline, anchor, self.last.get(ctx.client, ""))

    def streamed(
        self, grid: Grid, pending: dict[str, RoundContext], deadline: float, in_order: bool
    ) -> Iterator[Upload]:
        """Accepted uploads as they arrive, one in memory at a time, until all sites have answered or the deadline is
        over.

        With `in_order` they are fetched in the order of `pending`, while the others wait on the SuperLink. The sums
        then do not depend on which site was faster.
        """
        end = time.monotonic() + deadline
        while pending:
            over, answered = time.monotonic() > end, False
            for message_id in list(pending) if over or not in_order else list(pending)[:1]:
                for reply in grid.pull_messages([message_id]):
                    answered = True
                    upload = self.judged(reply, pending.pop(message_id))
                    del reply
                    if upload is not None:
                        yield upload
                    del upload
            if over:
                for ctx in pending.values():
                    self._failed(ctx, f"no reply within {deadline:g} s")
                return
            if not answered:
                time.sleep(_POLL_SECONDS)

    def within(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        """The uploads whose norm is at most `norm_factor` times the median of their variant; the others are refused.

        Holds all uploads of the round, for the median is not known before the last one. Of a variant with fewer than
        three uploads none is refused, for a median of two says nothing.
        """
        held = list(uploads)
        by_variant: dict[str, list[float]] = {}
        for found in self.undecided.values():
            by_variant.setdefault(found.variant, []).append(found.norm)
        for upload in held:
            found = self.undecided.pop(upload.ctx.client)
            most = self.norm_factor * statistics.median(by_variant[found.variant])
            if found.norm <= most or len(by_variant[found.variant]) < _FEWEST_FOR_A_MEDIAN:
                self._accepted(found, upload)
                yield upload
            else:
                reason = f"upload: expected a norm of at most {most:g} (cohort.norm-factor), found {found.norm:g}"
                self._refused(found.data, found.sent, upload.ctx, reason)

    def judged(self, reply: Message, ctx: RoundContext) -> Upload | None:
        """The upload in a reply. If it is refused, None, with the reason in the record.

        It counts as accepted from here on, or, where there is a `norm_factor`, once `within` has passed it on.
        """
        if reply.has_error():
            why = _LOST.get(reply.error.code, reply.error.reason)
            self._failed(ctx, f"{why} (code {reply.error.code})")
            return None
        data: Buffer = b""
        sent, refused = 0, ""
        try:
            sent = sent_bytes(reply)
            data = intake.message_bytes(reply, self.largest_upload, self.folder.folder if self.folder else None)
            message, upload, norm = self._read(data, ctx)
            site_log = _anchor(reply)
        except (WireError, UploadRefused) as error:
            refused = str(error)
        except Exception as error:  # whatever one reply does to this code, the round belongs to the other sites too
            log(ERROR, "round %s: judging the reply of %s failed", ctx.round + 1, ctx.client, exc_info=error)
            refused = type(error).__name__
        self.record.upload_bytes += sent
        if refused:
            self._refused(data, sent, ctx, refused)
            return None
        self.turns[ctx.client] = message.turn
        kept = data if self.tap else b""
        found = _Judged(kept, sent, message.disclosed, site_log, message.payload.variant, norm)
        if self.norm_factor:
            self.undecided[ctx.client] = found
        else:
            self._accepted(found, upload)
        return upload

    @property
    def largest_upload(self) -> int:
        """The most bytes that a client's message can have."""
        return self.exchange.largest_upload

    def _read(self, data: Buffer, ctx: RoundContext) -> tuple[envelope.Message, Upload, float]:
        """The message in `data`, the upload that it is, and that upload's norm. Raises WireError, UploadRefused."""
        message = self.exchange.receive(data, ctx.round, ctx.address)
        return message, *intake.judge(self.exchange, message, ctx, self.limits)

    def _accepted(self, found: _Judged, upload: Upload) -> None:
        site = upload.ctx.client
        self._noted(found.disclosed, upload.ctx, "up", "accepted", site_log=found.site_log)
        self._tapped(found.data, upload.ctx, "up", accepted=True)
        self.record.accepted.append(site)
        self.record.reports |= {site: report} if (report := self._report(upload)) else {}

    def _report(self, upload: Upload) -> dict[str, float]:
        """What is known of an upload beside its values."""
        return {"num_examples": upload.num_examples, **upload.report}

    def _refused(self, data: Buffer, sent: int, ctx: RoundContext, reason: str) -> None:
        self.record.unlisted[ctx.client] = [sent, 0, 1, 0]
        self._failed(ctx, f"refused: {reason}", up_bytes=sent)
        self._tapped(data, ctx, "up", accepted=False)
        log(WARNING, "round %s: %s: %s", ctx.round + 1, ctx.client, self.record.failed[ctx.client])

    def _noted(
        self, disclosed: Mapping[str, Any], ctx: RoundContext, direction: Direction, event: str, **more: str
    ) -> str:
        """Records a message in disclosure.jsonl and the audit log. Returns the log's anchor; "" without a folder."""
        if self.folder is None:
            return ""
        self.folder.disclosed(disclosed, self.record, ctx.client, direction)
        fields = [[name, size] for name, _, _, size in disclosed["fields"]]
        about = {"bytes": disclosed["bytes"], "variant": disclosed["variant"], "fields": fields, **more}
        about |= {"figures": disclosed["figures"]} if disclosed["figures"] else {}
        return self.folder.audit(event, self._where(ctx) | about)

    def _tapped(self, data: Buffer, ctx: RoundContext, direction: Direction, accepted: bool | None = None) -> None:
        if self.tap:
            self.tap.write(data, ctx.round, self.record.attempt, ctx.client, direction, accepted)

    def _failed(self, ctx: RoundContext, reason: str, **more: int) -> None:
        self.record.failed[ctx.client] = shown(reason, REASON_CHARACTERS)
        if self.folder:
            self.folder.audit("failed", self._where(ctx) | {"reason": self.record.failed[ctx.client], **more})

    def _where(self, ctx: RoundContext) -> dict[str, str | int]:
        return {"round": ctx.round, "attempt": self.record.attempt, "site": ctx.client}


def order_of(
    exchange: Exchange, run: str, ctx: RoundContext, deadline: float, anchor: str = "", last: str = ""
) -> ConfigRecord:
    """What a site is asked beside a message; `last`: its last turn whose upload is in the server's state."""
    fields = json.dumps(fields_of(exchange.method))
    order = ConfigRecord({"round": ctx.round, "is-new": ctx.is_new, "site": ctx.client, "run": run})
    order["attempt"], order["last"] = ctx.address.attempt, last
    order["method"], order["fields"], order["log"] = exchange.name, fields, anchor
    order["seconds"] = float(deadline)
    return order


def sent_bytes(reply: Message) -> int:
    """Of a reply's arrays, whatever is in them."""
    return sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())


def _anchor(reply: Message) -> str:
    """The anchor of the site's audit log in a reply; "" if there is none, or it is malformed."""
    record = reply.content.config_records.get("log")
    try:
        return str(Head.parse(str(record["head"]))) if record else ""
    except (KeyError, StateError):
        return ""


class Shared:
    """The slices of an attempt's messages, each once, whatever message it was in first and however they alternate."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Array] = {}
        self._records: dict[tuple[int, ...], ArrayRecord] = {}

    def record(self, parts: list[Buffer]) -> ArrayRecord:
        """The message's slices, which take the place of its parts: no second copy of it is made. Equal slices are the
        same objects, and equal messages the same record.
        """
        arrays: dict[str, Array] = {}
        for i, part in enumerate(slices.sliced(slices.drained(parts))):
            known = self._arrays.setdefault(xxhash.xxh3_128_digest(part), array := _array(part))
            arrays[slices.name(i)] = known if known is array or known.data == part else array
        key = tuple(id(array.data) for array in arrays.values())  # the bytes stay as long as this object
        return self._records.setdefault(key, ArrayRecord(arrays))


def _array(part: bytes) -> Array:
    return Array("uint8", (len(part),), slices.STYPE, part)
