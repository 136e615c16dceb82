"""Send secure-aggregation requests to many sites at once, and process the answers as they arrive.

| a site ... | the reason recorded |
|---|---|
| is not connected | "not connected" |
| does not answer in time (default: `SECONDS`) | "no answer within 120 s" |
| refuses, or fails | its own reason, with Flower's code |
| sends an answer that is refused | the field and what is wrong |
| sends an answer that makes the server's code fail | the error type; its text is in the server's log |
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from logging import ERROR

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore import log

from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext
from fedveil.errors import WireError
from fedveil.federation.secagg.schema import MOST_BYTES, SecAggMessage
from fedveil.sanitize import sanitize
from fedveil.server_app.reception import ArrivedReply, LostReply, Reception, RefusedReply, ReplyOutcome
from fedveil.server_app.round_attempt import REASON_CHARACTERS, AttemptTally, DeduplicatedSlices
from fedveil.wire import statement_envelope

SECONDS = 120.0  # time limit for an answer that needs no training
_QUESTION = "query.secure"  # Flower's type for a message about keys or shares
_POLL_SECONDS = 0.1


@dataclass
class SecAggRequests:
    """One attempt's requests to the sites, and the number of messages.

    Attributes:
        nodes: node ids by site.
        order: builds the instruction record sent along with a request.
        round, address: the round and the exchange that the messages belong to.
        up, down: bytes of answers and requests so far, by site.
        asked, answered: number of requests and answers so far, by site.
    """

    reception: Reception
    nodes: Mapping[str, int]
    order: Callable[[RoundContext], ConfigRecord]
    round: int
    address: MessageAddress
    config: ConfigRecord
    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)

    def ask(
        self,
        asked: Mapping[str, SecAggMessage],
        take: Callable[[str, bytes], None],
        enough: Callable[[], bool] = bool,
        seconds: float = SECONDS,
    ) -> dict[str, str]:
        """Pass each answer to `take`, until all sites have answered, `enough` returns true, or `seconds` have passed.

        Returns the reason, by site, for each site that gave no answer or whose answer `take` refused.
        """
        sites, shared = [site for site in asked if site in self.nodes], DeduplicatedSlices()
        self.reception.ask({site: self._message(site, asked[site], shared, seconds) for site in sites}, MOST_BYTES)
        waiting = set(sites)
        failed = {site: "not connected" for site in asked if site not in self.nodes}
        end = time.monotonic() + seconds
        while waiting and not enough() and time.monotonic() < end:
            answered = False
            for reply in self.reception.poll_replies():
                answered = True
                waiting.remove(reply.site)
                if reason := self._taken(reply, take):
                    failed[reply.site] = sanitize(reason, REASON_CHARACTERS)
            if not answered:
                time.sleep(_POLL_SECONDS)
        late = self.reception.close_requests()
        return failed | {site: f"no answer within {seconds:g} s" for site in late if not enough()}

    def count(self, tally: AttemptTally) -> None:
        """Add the requests and their answers to an attempt's message counts; call it once after all requests."""
        tally.upload_bytes += self.up.total()
        tally.download_bytes += self.down.total()
        for site in self.up | self.down:
            own = self.up[site], self.down[site], self.answered[site], self.asked[site]
            before = tally.unlisted.get(site, (0, 0, 0, 0))
            tally.unlisted[site] = [a + b for a, b in zip(before, own, strict=True)]

    def _message(self, site: str, statement: SecAggMessage, shared: DeduplicatedSlices, seconds: float) -> Message:
        """Return a message for all sites of the attempt, so that equal statements are sent once."""
        data = statement_envelope.pack_statement(statement.to_bytes(), self.round, "down", self.address.of_broadcast)
        self.down[site] += len(data)
        self.asked[site] += 1
        order = self.order(RoundContext(self.round, site, False, b"", address=replace(self.address, site=site)))
        content = RecordDict({"fedveil": shared.record([data]), "order": order, "config": self.config})
        group = f"{self.round}/{MOST_BYTES}"  # the fleet port accepts no larger reply
        return Message(content, self.nodes[site], _QUESTION, ttl=2 * seconds, group_id=group)

    def _taken(self, reply: ReplyOutcome, take: Callable[[str, bytes], None]) -> str:
        """Return why the reply has no valid answer; "" if it has one."""
        try:
            take(reply.site, self._answer(reply))
        except WireError as error:
            return str(error)
        except Exception as error:  # one bad answer must not end the round for the other sites
            log(ERROR, "round %s: reading the answer from %s failed", self.round + 1, reply.site, exc_info=error)
            return type(error).__name__
        return ""

    def _answer(self, reply: ReplyOutcome) -> bytes:
        site = reply.site
        match reply:
            case LostReply():
                raise WireError(f"{reply.reason} (code {reply.code})" if reply.code else reply.reason)
            case RefusedReply():
                self.up[site] += reply.received_bytes
                self.answered[site] += 1
                raise WireError(reply.reason)
            case ArrivedReply():
                self.up[site] += len(reply.data)
                self.answered[site] += 1
        data, address = bytes(reply.data), replace(self.address, site=site)
        return statement_envelope.unpack_statement(data, self.round, "up", address, MOST_BYTES)
