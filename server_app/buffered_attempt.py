"""One server step from a buffer of uploads (`cohort.buffer-size`), in place of an attempt with a cohort.

One reception serves the whole run, and a site has at most one open request. The request decides which site and which
state an upload belongs to (reception.py): a second reply, or a reply to an older request, answers no open request and
is dropped, and the envelope of an upload has to name the round and attempt of the request. So no upload counts twice.

| a request ... | what happens |
|---|---|
| is answered in time | its upload is added to the current step, even if it was for an earlier state |
| is answered with an upload more than `cohort.max-staleness` steps old | the upload is refused, with the reason |
| is not answered within `cohort.deadline-seconds` | it ends; a later reply is dropped |
| ends in any way | the site is asked again at the next step |

| the step ... | what happens |
|---|---|
| has `cohort.buffer-size` uploads | the server takes it, without waiting for the other sites |
| has fewer, and no request is open | the attempt is below the quorum: its uploads are discarded, and the step is
  repeated |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.federation.update_buffer import SitesInFlight, describe_discard
from fedveil.server_app.reception import ArrivedReply, Reception, ReplyOutcome
from fedveil.server_app.round_attempt import POLL_SECONDS, AttemptResult, RoundAttempt


@dataclass(frozen=True)
class BufferedAttempt(RoundAttempt):
    """An attempt at one server step. `contexts` are those of all open requests, new and old.

    Attributes:
        flight: the open requests and their states, which outlive the attempt.
        expires: by site, the time at which its open request ends (`time.monotonic`), which outlives the attempt.
        newly_asked: the contexts of the sites that this attempt asks.
        staleness: by accepted site, its upload's staleness; filled in while the attempt runs.
    """

    flight: SitesInFlight = field(kw_only=True)
    expires: dict[str, float] = field(kw_only=True)
    newly_asked: Sequence[RoundContext] = field(kw_only=True)
    staleness: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    @override
    def asked(self) -> Sequence[RoundContext]:
        return self.newly_asked

    @override
    def run(self, uploads: Iterator[AcceptedUpload]) -> AttemptResult:
        result = super().run(uploads)
        ended = {*self.tally.accepted, *self.tally.failed}
        cohort = sorted({ctx.client for ctx in self.newly_asked} | ended)
        return replace(result, record=replace(result.record, cohort=cohort, staleness=dict(self.staleness)))

    @override
    def iter_uploads(self, reception: Reception, deadline: float) -> Iterator[AcceptedUpload]:
        """Yield accepted uploads as they arrive, until the buffer is full or no request is open.

        Sites are polled one at a time, the longest-waiting first: the SuperLink delivers a reply only once, so none is
        fetched while the step has no room for it.
        """
        flight = self.flight
        self.expires.update({ctx.client: time.monotonic() + deadline for ctx in self.newly_asked})
        while flight.contexts and not self._is_full:
            answered = False
            for site in list(flight.contexts):
                for reply in reception.poll_replies(site):
                    answered = True
                    if reply.site not in flight.contexts:
                        reception.drop_outcome(reply)
                        continue
                    upload = self.judge_reply(reply, flight.land(reply.site))
                    del reply
                    if upload is not None:
                        yield upload
                    del upload
                if self._is_full:
                    return
            now = time.monotonic()
            for site in [site for site in flight.contexts if self.expires[site] < now]:
                reception.close_request(site)
                self._fail(flight.land(site), f"no reply within {deadline:g} s")
            if not answered:
                time.sleep(POLL_SECONDS)

    @property
    def _is_full(self) -> bool:
        return len(self.tally.accepted) >= self.settings.cohort.buffer_size

    @override
    def judge_reply(self, reply: ReplyOutcome, ctx: RoundContext) -> AcceptedUpload | None:
        """Return the upload in a reply. Refuse one that is too stale, as `RoundAttempt` refuses invalid ones."""
        if isinstance(reply, ArrivedReply) and self.flight.is_too_stale(ctx):
            self.tally.upload_bytes += len(reply.data)
            reason = describe_discard(self.flight.staleness(ctx), self.flight.max_staleness)
            self._refuse(reply.data, len(reply.data), ctx, reason)
            return None
        upload = super().judge_reply(reply, ctx)
        if upload is not None:
            self.staleness[ctx.client] = self.flight.staleness(ctx)
        return upload
