"""Record the messages of one attempt: disclosure.jsonl, the audit log, progress.json and the capture.

A round's result is recorded at its end (rounds.py). A message is recorded immediately: the server may be killed in the
middle of the round, and its files must list everything that has left a site by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Direction
from fedveil.contract.method import RoundContext
from fedveil.server_app.run_folder import RunFolder
from fedveil.wire.capture import MessageCapture


@dataclass(frozen=True)
class RunMessageRecorder:
    """The `MessageRecorder` for one attempt at a round.

    Attributes:
        folder: the run folder, or None to record nothing.
        capture: stores whole messages, or None to store none.
        cohort: all sites of the attempt, for progress.json.
        step: with cohort.buffer-size, the round whose server step takes the uploads, which the records of replies then
            name along with the staleness of each; None otherwise.
        step_attempt: the attempt at that step.
    """

    folder: RunFolder | None
    capture: MessageCapture | None
    cohort: Sequence[str]
    step: int | None = None
    step_attempt: int = 0

    @property
    def with_data(self) -> bool:
        """Return whether whole messages are stored."""
        return self.capture is not None

    def record_sent(self, ctx: RoundContext, disclosed: Mapping[str, Any], parts: Sequence[Buffer]) -> str:
        """Record a message to a site. Return the audit log's anchor after it; "" without a folder."""
        anchor = self._disclose(ctx, disclosed, "down", "sent", {})
        if self.capture:
            self._store(ctx, b"".join(parts), "down")
        return anchor

    def record_accepted(
        self,
        ctx: RoundContext,
        disclosed: Mapping[str, Any],
        data: Buffer,
        site_log: str,
        signed: Mapping[str, str | int],
    ) -> None:
        """Record an upload that is about to be added up, the anchor of the site's log, and the signed claims."""
        evidence = {"signed": dict(signed)} if signed else {}
        self._disclose(ctx, disclosed, "up", "accepted", {"site_log": site_log, **evidence})
        self._store(ctx, data, "up", accepted=True)

    def record_failed(self, ctx: RoundContext, reason: str) -> None:
        """Record that a site sent no usable upload, and the reason."""
        self._audit(ctx, "failed", {"reason": reason})

    def record_refused(self, ctx: RoundContext, reason: str, data: Buffer, up_bytes: int) -> None:
        """Record a site's upload that the server does not add up."""
        self._audit(ctx, "failed", {"reason": reason, "up_bytes": up_bytes})
        self._store(ctx, data, "up", accepted=False)

    def _disclose(
        self, ctx: RoundContext, disclosed: Mapping[str, Any], direction: Direction, event: str, more: Mapping[str, Any]
    ) -> str:
        if self.folder is None:
            return ""
        step = None
        # In one process, a site's round is computed when its upload arrives, so its broadcast is counted there too.
        if self.step is not None and (direction == "up" or ctx.round != self.step):
            step = self.step, self.step_attempt
        self.folder.disclosed(disclosed, ctx, self.cohort, direction, step)
        fields = [[name, size] for name, _, _, size in disclosed["fields"]]
        about = {"bytes": disclosed["bytes"], "variant": disclosed["variant"], "fields": fields, **more}
        about |= {"figures": disclosed["figures"]} if disclosed["figures"] else {}
        return self._audit(ctx, event, about)

    def _audit(self, ctx: RoundContext, event: str, about: Mapping[str, Any]) -> str:
        where = {"round": ctx.round, "attempt": ctx.address.attempt, "site": ctx.client}
        if self.step is not None and event != "sent":
            where |= {"step": self.step, "staleness": self.step - ctx.round}
        return self.folder.audit(event, where | dict(about)) if self.folder else ""

    def _store(self, ctx: RoundContext, data: Buffer, direction: Direction, accepted: bool | None = None) -> None:
        if self.capture:
            self.capture.write(data, ctx.round, ctx.address.attempt, ctx.client, direction, accepted)
