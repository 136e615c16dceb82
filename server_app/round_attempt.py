"""One attempt at a round: build messages, validate replies, add up uploads and return the result.

An attempt returns an `AttemptResult`, which the loop records (rounds.py). An attempt that is killed returns nothing,
so it also passes each message to a `MessageRecorder` as it leaves or arrives.

| a site ... | its entry in the record's `failed` |
|---|---|
| does not answer by the deadline | "no reply within 900 s" |
| loses its client process, its SuperNode or its reply | an explanation instead of Flower's text |
| loses its worker twice in a client round | "WorkerError: the site's worker ended: out of memory", or another cause |
| raises | the type of its error; the message stays in the site's log |
| sends content that the reception, the envelope or the validation refuses | "refused: " + the field and what is wrong |
| sends content that makes the server's code fail | "refused: " + the error type; its text is in the server's log |
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, Protocol

import xxhash
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore import log

from fedveil.contract.codec import Buffer
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext, hyperparameters_of
from fedveil.errors import UploadRefused, WireError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.krum import MultiKrumAggregator
from fedveil.sanitize import sanitize
from fedveil.server_app import upload_validation
from fedveil.server_app.reception import (
    ArrivedReply,
    LostReply,
    Reception,
    RefusedReply,
    ReplyOutcome,
    read_given_reply,
)
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_settings import RunSettings
from fedveil.wire import chunking, envelope

POLL_SECONDS = 0.25
_GRACE_SECONDS = 60.0  # a message outlives its round, so that the round, not Flower, reports late sites
REASON_CHARACTERS = 300
_FEWEST_FOR_A_MEDIAN = 3
_LOST = {  # by Flower's ErrorCode
    3: "its message was lost before it had fully arrived: the site ended while it was sending, or the state of the "
    "site or the SuperLink was removed",
    4: "its reply was lost, or arrived too late",
    5: "its SuperNode has not been heard for a minute: its machine, its network or the process has failed, "
    "or its key was revoked, was replaced or has expired, which fedveil members list shows",
    8: "its client process (flwr-clientapp) ended without a message: killed, perhaps for lack of memory; see its log",
}


class MessageRecorder(Protocol):
    """Records an attempt's messages before the attempt continues: a killed attempt does not return a result."""

    @property
    def with_data(self) -> bool:
        """Return whether whole messages are stored; otherwise the attempt keeps none for the recorder."""
        ...

    def record_sent(self, ctx: RoundContext, disclosed: Mapping[str, Any], parts: Sequence[Buffer]) -> str:
        """Record a message to a site. Return the anchor of the server's audit log, which the message carries."""
        ...

    def record_accepted(
        self,
        ctx: RoundContext,
        disclosed: Mapping[str, Any],
        data: Buffer,
        site_log: str,
        signed: Mapping[str, str | int],
    ) -> None:
        """Record an upload that is about to be added up, the anchor of the site's log, and the signed claims."""

    def record_failed(self, ctx: RoundContext, reason: str) -> None:
        """Record that a site has no upload."""

    def record_refused(self, ctx: RoundContext, reason: str, data: Buffer, up_bytes: int) -> None:
        """Record a site's upload that the server does not add up."""


@dataclass
class AttemptTally:
    """Counts the results of an attempt so far, in the fields of its `RoundRecord`.

    Attributes:
        turns: client round of each upload that passed validation, by site.
    """

    accepted: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    unlisted: dict[str, list[int]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    unseen: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt.

    Attributes:
        record: the record without the scores and the weight digest, which exist only if the round counts.
        state: the server's next state if the attempt has a quorum; None without a sum or with too few uploads.
        turns: for each accepted site, the client round of its upload.
        is_lost: the round has no sum and cannot be repeated (secure_round.py).
    """

    record: RoundRecord
    state: FederatedState | None
    turns: Mapping[str, str]
    is_lost: bool = False


@dataclass(frozen=True)
class _JudgedUpload:
    """A validated upload's values for the records. `data` is kept only for a capture."""

    data: Buffer
    sent: int
    disclosed: Mapping[str, Any]
    site_log: str
    signed: Mapping[str, str | int]
    variant: str
    norm: float


@dataclass(frozen=True)
class RoundAttempt:
    """One attempt, with everything it needs. It has no access to the run's files or to other rounds.

    Attributes:
        exchange: the method's exchange for its parameter layout.
        server: the state to broadcast.
        settings: the run's settings: quorum, upload limits, and how uploads are aggregated.
        address: the run's name, under which sites store their private state, and the attempt's number.
        round: round number, 0-based.
        contexts: one context for each site of the cohort.
        recorder: receives each message as it leaves or arrives.
        folder: folder that stores a long upload until it is processed, or None to keep it in memory.
        last: each site's last client round whose upload is in `server`.
        undecided: validated uploads, by site, until `filter_by_norm` has decided on them.
        tally: filled in while the attempt runs.
    """

    exchange: MessageExchange
    server: FederatedState
    settings: RunSettings
    address: MessageAddress
    round: int
    contexts: Sequence[RoundContext]
    recorder: MessageRecorder
    folder: Path | None = None
    last: Mapping[str, str] = field(default_factory=dict)
    undecided: dict[str, _JudgedUpload] = field(default_factory=dict)
    tally: AttemptTally = field(default_factory=AttemptTally)

    @property
    def asked(self) -> Sequence[RoundContext]:
        """Return the contexts of the sites that the attempt sends a message to."""
        return self.contexts

    def build_messages(self, nodes: Mapping[str, int], deadline: float, config: ConfigRecord) -> list[Message]:
        """Return one message for each of `asked`. Equal messages share one array object, which Flower uploads once."""
        ttl = deadline + _GRACE_SECONDS
        messages, shared = [], DeduplicatedSlices()
        if (limit := chunking.MAX_REPLY_SLICES * chunking.SLICE_BYTES) < self.largest_upload:
            log(
                WARNING,
                "round %s: an upload may have %s bytes, but the server's fleet port refuses replies of more than %s; "
                "train fewer weights, or send them in fewer bits",
                self.round + 1,
                f"{self.largest_upload:,}",
                f"{limit:,}",
            )
        for ctx in self.asked:
            message = self.exchange.packed(self.server, ctx)
            self.tally.download_bytes += message.disclosed["bytes"]
            anchor = self.recorder.record_sent(ctx, message.disclosed, message.parts)
            record = shared.record(message.parts)
            order = self.build_instruction(ctx, anchor, deadline)
            content = RecordDict({"fedveil": record, "order": order, "config": config})
            # The fleet port does not accept larger replies (fedveil/guard/fleet/announcement.py).
            group = f"{ctx.round}/{self.largest_upload}"
            messages.append(Message(content, nodes[ctx.client], MessageType.TRAIN, ttl=ttl, group_id=group))
        return messages

    def build_instruction(self, ctx: RoundContext, anchor: str, deadline: float) -> ConfigRecord:
        """Return the instruction record sent along with a message."""
        return round_instruction(self.exchange, self.address.run, ctx, deadline, anchor, self.last.get(ctx.client, ""))

    def run(self, uploads: Iterator[AcceptedUpload]) -> AttemptResult:
        """Add up the uploads from `iter_uploads` or `iter_given_uploads`. Return the attempt's result."""
        state, tally = self.aggregate(uploads), self.tally
        record = RoundRecord(
            self.round, self.address.attempt, [ctx.client for ctx in self.contexts], tally.accepted, tally.failed,
            tally.upload_bytes, tally.download_bytes, tally.unlisted, tally.reports, tally.cut, tally.left_out,
            tally.unsigned, tally.unseen,
        )  # fmt: skip
        has_quorum = len(tally.accepted) >= self.settings.quorum or self.has_closed_list
        turns = {site: tally.turns[site] for site in tally.accepted}
        return AttemptResult(record, state if has_quorum else None, turns, bool(tally.unseen.get("lost")))

    @property
    def has_closed_list(self) -> bool:
        """Return whether the uploads were accepted before a restart, regardless of the current quorum."""
        return False

    def aggregate(self, uploads: Iterator[AcceptedUpload]) -> FederatedState | None:
        """Return the next state from unmasked uploads; the unchanged state if there are too few."""
        tally, cohort = self.tally, self.settings.cohort
        sums = aggregation_rules.make_aggregator(self.settings.aggregate)
        if cohort.max_norm_ratio:
            uploads = self.filter_by_norm(uploads)
        uploads = aggregation_rules.bound_weights(uploads, cohort.max_weight_fraction, tally.cut.__setitem__)
        state = self.exchange.aggregate(self.server, uploads, lambda: sums, cohort.min_sites)
        if tally.cut:
            log(
                WARNING,
                "round %s: cohort.max-weight-fraction reduced the number of examples that count: %s",
                self.round + 1,
                tally.cut,
            )
        if isinstance(sums, MultiKrumAggregator) and len(tally.accepted) >= cohort.min_sites:
            tally.left_out = sorted(set(tally.accepted) - set(sums.chosen))
        return state

    def iter_uploads(self, reception: Reception, deadline: float) -> Iterator[AcceptedUpload]:
        """Yield accepted uploads as they arrive, one in memory at a time, until all sites have answered or the deadline
        has passed. `reception` has already sent the requests.

        In a deterministic run, uploads are fetched in the order of the contexts, while other uploads wait on the
        SuperLink. So the sums do not depend on which site was faster.
        """
        end, in_order = time.monotonic() + deadline, self.settings.deterministic
        pending = {ctx.client: ctx for ctx in self.contexts}
        while pending:
            over, answered = time.monotonic() > end, False
            for reply in reception.poll_replies(next(iter(pending)) if in_order and not over else ""):
                answered = True
                upload = self.judge_reply(reply, pending.pop(reply.site))
                del reply
                if upload is not None:
                    yield upload
                del upload
            if over:
                for site in reception.close_requests():
                    self._fail(pending[site], f"no reply within {deadline:g} s")
                return
            if not answered:
                time.sleep(POLL_SECONDS)

    def iter_given_uploads(self, replies: Iterable[Message], nodes: Mapping[str, int]) -> Iterator[AcceptedUpload]:
        """Yield the accepted uploads from replies that a caller's own loop has collected."""
        waiting = {nodes[ctx.client]: ctx for ctx in self.contexts}
        for reply in replies:
            # An error created by the SuperLink does not name a node; its site then stays in `waiting`.
            ctx = waiting.pop(reply.metadata.src_node_id, None)
            if ctx is None:
                continue
            outcome = read_given_reply(reply, ctx.client, self.largest_upload, self.folder)
            if (upload := self.judge_reply(outcome, ctx)) is not None:
                yield upload
        self.tally.failed |= {ctx.client: "no reply" for ctx in waiting.values()}

    def filter_by_norm(self, uploads: Iterable[AcceptedUpload]) -> Iterator[AcceptedUpload]:
        """Yield the uploads whose norm is at most cohort.max-norm-ratio times their variant's median norm; refuse the
        others.

        Stores all uploads of the round, because the median is not known until the last one arrives. If a variant has
        fewer than three uploads, none is refused, because a median of two is not meaningful.
        """
        all_uploads = list(uploads)
        by_variant: dict[str, list[float]] = {}
        for judged in self.undecided.values():
            by_variant.setdefault(judged.variant, []).append(judged.norm)
        for upload in all_uploads:
            judged = self.undecided.pop(upload.ctx.client)
            most = self.settings.cohort.max_norm_ratio * statistics.median(by_variant[judged.variant])
            if judged.norm <= most or len(by_variant[judged.variant]) < _FEWEST_FOR_A_MEDIAN:
                self._accept(judged, upload)
                yield upload
            else:
                reason = f"upload: its norm of {judged.norm:g} exceeds {most:g} (cohort.max-norm-ratio)"
                self._refuse(judged.data, judged.sent, upload.ctx, reason)

    def judge_reply(self, reply: ReplyOutcome, ctx: RoundContext) -> AcceptedUpload | None:
        """Return the upload in a reply. For a refused upload, return None and record the reason in the tally.

        The upload counts as accepted from now on or, with cohort.max-norm-ratio, once `filter_by_norm` has yielded it.
        """
        match reply:
            case LostReply():
                why = _LOST.get(reply.code, reply.reason)
                self._fail(ctx, f"{why} (code {reply.code})" if reply.code else why)
                return None
            case RefusedReply():
                self.tally.upload_bytes += reply.received_bytes
                self._refuse(b"", reply.received_bytes, ctx, reply.reason)
                return None
            case ArrivedReply():
                return self._judge_upload(reply, ctx)

    def _judge_upload(self, reply: ArrivedReply, ctx: RoundContext) -> AcceptedUpload | None:
        data, sent, refused = reply.data, len(reply.data), ""
        self.tally.upload_bytes += sent
        try:
            message, upload, norm = self._read(data, ctx)
        except (WireError, UploadRefused) as error:
            refused = str(error)
        except Exception as error:  # one bad reply must not end the round for the other sites
            log(ERROR, "round %s: checking the reply from %s failed", ctx.round + 1, ctx.client, exc_info=error)
            refused = type(error).__name__
        if refused:
            self._refuse(data, sent, ctx, refused)
            return None
        self.tally.turns[ctx.client] = message.turn
        kept = data if self.recorder.with_data else b""
        judged = _JudgedUpload(
            kept, sent, message.disclosed, reply.site_log, reply.signed, message.payload.variant, norm
        )
        if self.settings.cohort.max_norm_ratio:
            self.undecided[ctx.client] = judged
        else:
            self._accept(judged, upload)
        return upload

    @property
    def largest_upload(self) -> int:
        """Return the maximum size of a client's message in bytes."""
        return self.exchange.largest_upload

    def _read(self, data: Buffer, ctx: RoundContext) -> tuple[envelope.DecodedMessage, AcceptedUpload, float]:
        """Return the message in `data`, its upload, and that upload's norm. Raises WireError, UploadRefused."""
        message = self.exchange.receive(data, ctx.round, ctx.address)
        return message, *upload_validation.judge_upload(self.exchange, message, ctx, self.settings.limits)

    def _accept(self, judged: _JudgedUpload, upload: AcceptedUpload) -> None:
        site = upload.ctx.client
        self.recorder.record_accepted(upload.ctx, judged.disclosed, judged.data, judged.site_log, judged.signed)
        self.tally.accepted.append(site)
        if not judged.signed:
            self.tally.unsigned.append(site)
        self.tally.reports |= {site: report} if (report := self._report(upload)) else {}

    def _report(self, upload: AcceptedUpload) -> dict[str, float]:
        """Return the metrics that a site reports along with its upload."""
        return {"num_examples": upload.num_examples, **upload.report}

    def _refuse(self, data: Buffer, sent: int, ctx: RoundContext, reason: str) -> None:
        self.tally.unlisted[ctx.client] = [sent, 0, 1, 0]
        why = self.tally.failed[ctx.client] = sanitize(f"refused: {reason}", REASON_CHARACTERS)
        self.recorder.record_refused(ctx, why, data, sent)
        log(WARNING, "round %s: %s: %s", ctx.round + 1, ctx.client, why)

    def _fail(self, ctx: RoundContext, reason: str) -> None:
        why = self.tally.failed[ctx.client] = sanitize(reason, REASON_CHARACTERS)
        self.recorder.record_failed(ctx, why)


def round_instruction(
    exchange: MessageExchange, run: str, ctx: RoundContext, deadline: float, anchor: str = "", last: str = ""
) -> ConfigRecord:
    """Build the instruction record sent along with a message.

    `last` is the site's last client round whose upload is in the server's state.
    """
    fields = json.dumps(hyperparameters_of(exchange.method))
    order = ConfigRecord({"round": ctx.round, "is-new": ctx.is_new, "site": ctx.client, "run": run})
    order["attempt"], order["last"] = ctx.address.attempt, last
    order["method"], order["fields"], order["log"] = exchange.name, fields, anchor
    order["seconds"] = float(deadline)
    order["entries"] = ctx.entries.to_text() if ctx.entries else ""
    return order


class DeduplicatedSlices:
    """The slices of an attempt's messages, each stored once even if it occurs in several messages."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Array] = {}
        self._records: dict[tuple[int, ...], ArrayRecord] = {}

    def record(self, parts: list[Buffer]) -> ArrayRecord:
        """Return a record with the message's slices. Slicing consumes `parts`, so that no second copy stays in memory.

        Equal slices are the same object, and equal messages are the same record.

        """
        arrays: dict[str, Array] = {}
        for i, part in enumerate(chunking.slice_message(chunking.drain_parts(parts))):
            known = self._arrays.setdefault(xxhash.xxh3_128_digest(part), array := _array(part))
            arrays[chunking.slice_key(i)] = known if known is array or known.data == part else array
        key = tuple(id(array.data) for array in arrays.values())  # the bytes live as long as this object
        return self._records.setdefault(key, ArrayRecord(arrays))


def _array(part: bytes) -> Array:
    return Array("uint8", (len(part),), chunking.STYPE, part)
