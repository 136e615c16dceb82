"""A round with masked uploads: its keys, its sum, and the exchanges that a round without masks does not need.

The parts of secure aggregation that do not depend on Flower are in fedveil/federation/secagg. A prekey is for one
attempt, and the next prekey comes with the upload; the server asks a site for a key if it has none, so after a restart
it asks every site. The sites in a sum first sign the list of its sites, unless the list is the whole cohort; then they
reveal their shares.

| a site ... | what happens |
|---|---|
| provides no key | it is left out of the cohort; its reason is in the record's `failed` |
| agreed to a sum in this round before a restart | it is left out too, because it would refuse the round |
| fails in the round | the server asks for its key again |
| does not sign the list, or reveals no shares or wrong ones | nothing, as long as enough other sites do |
| provably lies about shares | the run continues without it |

| the round ... | what happens |
|---|---|
| has too few uploads, or pairs of sites in dispute | the attempt is discarded and repeated; with an entry table or
  secure.whole-cohort, the round is lost, since a site masks only once in such a round |
| has too few signatures or shares, or an impossible sum | the round is lost: its sites have agreed to a sum and would
  refuse another attempt; the next round starts from the same state |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from logging import WARNING
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.supercore import log
from typing_extensions import override

from fedveil.config import SecureConfig
from fedveil.contract.codec import Buffer
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.errors import ConfigError, QuorumError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg import entry_plan, server
from fedveil.federation.secagg.flatten import FixedPointSums
from fedveil.federation.secagg.in_process import secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.messages import AgreeResponse, KeysResponse, OpenResponse
from fedveil.federation.secagg.plan import broadcast_digest
from fedveil.federation.secagg.roster import SigningKeyRoster
from fedveil.federation.secagg.unmasking import UnmaskingAttempt
from fedveil.sanitize import sanitize
from fedveil.server_app.pending_sum import PendingSum, PendingSumStore
from fedveil.server_app.reception import Reception
from fedveil.server_app.round_attempt import REASON_CHARACTERS, RoundAttempt, round_instruction
from fedveil.server_app.secagg_requests import SECONDS, SecAggRequests
from fedveil.wire import envelope, header

_LEAST_GRACE_SECONDS = 5.0  # minimum time for other sites to sign after a quorum has signed
_OPEN_TRIES = 3


@dataclass(frozen=True)
class SecureRoundAttempt(RoundAttempt):
    """An attempt whose uploads are masked vectors, added up as they arrive.

    Attributes:
        requests: requests to the sites of the sum.
        unmasking: the sum of the masked vectors, and the shares that unmask it.
        codec: codec of the masked uploads.
        coordinator: manages the sites' keys for the run.
        server_ctx: context for the server's own random draws in the round.
        roster: text with the signing keys that the plan refers to; "" for none.
        scalars: values that each site sends unmasked, by site; filled in while the attempt runs.
        pending: store that keeps the closed list for a restart, or None to keep no list.
        is_resumed: the list was closed before a restart, under the settings of that time.
    """

    requests: SecAggRequests = field(kw_only=True)
    unmasking: UnmaskingAttempt = field(kw_only=True)
    codec: MaskedUploadCodec = field(kw_only=True)
    coordinator: server.SecAggCoordinator = field(kw_only=True)
    server_ctx: RoundContext = field(kw_only=True)
    roster: str = field(default="", kw_only=True)
    scalars: dict[str, dict[str, str]] = field(default_factory=dict, kw_only=True)
    pending: PendingSumStore | None = field(default=None, kw_only=True)
    is_resumed: bool = field(default=False, kw_only=True)

    @override
    def build_instruction(self, ctx: RoundContext, anchor: str, deadline: float) -> ConfigRecord:
        order = super().build_instruction(ctx, anchor, deadline)
        order["secure"], order["roster"] = self.unmasking.plan.to_bytes().decode(), self.roster
        return order

    @property
    @override
    def largest_upload(self) -> int:
        return self.codec.largest_upload

    @property
    @override
    def has_closed_list(self) -> bool:
        return self.is_resumed

    @override
    def aggregate(self, uploads: Iterator[AcceptedUpload]) -> FederatedState | None:
        """Return the next state from the uploads, which are added up as they arrive; None if there is no sum.

        Below the quorum, no site is asked to agree to a sum.
        """
        for _ in uploads:
            continue
        quorum, tally, attempt = self.settings.quorum, self.tally, self.unmasking
        try:
            if len(attempt.uploads) < quorum and not self.is_resumed:
                raise QuorumError(f"at least {quorum} uploads are needed, but only {len(attempt.uploads)} arrived")
            if self.server_ctx.entries is not None:
                self.server_ctx.entries.require_sum(attempt.plan.cohort, attempt.uploads, attempt.plan.least)
            attempt.close()
            if self.pending is not None:
                self.pending.save(PendingSum(attempt, tally.turns, self.scalars), attempt.masked_total)
            return self.exchange.server_update(self.server, self._open_sum(), self.server_ctx)
        except (QuorumError, WireError) as error:
            tally.unseen["reason"] = sanitize(str(error), REASON_CHARACTERS)
            # Its sites may have agreed to a sum. Or they mask only once a round: with an entry table or a whole cohort.
            if attempt.in_sum or attempt.plan.entries or attempt.plan.is_whole:
                tally.unseen["lost"] = True
            log(WARNING, "round %s: no sum: %s", self.round + 1, tally.unseen["reason"])
            for site, reason in attempt.faulty.items():
                self.coordinator.expel(site, reason)
            return None
        finally:
            self.requests.count(tally)
            for site in tally.failed:  # its prekey may be used up
                self.coordinator.forget(site)

    def _open_sum(self) -> FixedPointSums:
        """Ask the sites in the closed list to agree to it and to reveal their shares. Return the sum.

        Raises:
            QuorumError, WireError: there is no sum.
        """
        attempt, unseen = self.unmasking, self.tally.unseen
        plan = attempt.plan
        unseen |= {
            "sites": len(attempt.in_sum), "cohort": len(plan.members), "quorum": plan.quorum,
            "threshold": plan.threshold, "neighbours": plan.neighbours, "colluding": plan.colluding,
        }  # fmt: skip
        seconds = max(SECONDS, self.settings.cohort.deadline_seconds)
        deaf: dict[str, str] = {}
        if attempt.needs_agreement:
            deaf |= self._ask_to_agree(seconds)
        if not plan.is_whole:
            self._ask_to_open(deaf, seconds)
        unseen["deaf"] = deaf
        for site, attached in attempt.uploads.items():
            try:
                self.coordinator.keep(site, plan, attached.next)
            except WireError as error:  # the site is asked for another prekey before the next attempt
                log(WARNING, "round %s: %s: its next prekey: %s", self.round + 1, site, error)
        scalars = {site: self.scalars.get(site, {}) for site in attempt.uploads}
        sums = FixedPointSums(self.codec.slots, self.codec.ring(plan), attempt.total(), scalars)
        sums.check(self.settings.limits.max_norm)
        return sums

    def _ask_to_agree(self, seconds: float) -> dict[str, str]:
        """Ask the list's sites to sign it. After a quorum has signed, the other sites get as much time again.

        Returns the reasons for the sites that have not signed.
        """
        attempt, started, quorum_at = self.unmasking, time.monotonic(), list[float]()

        def take(site: str, data: bytes) -> None:
            attempt.take_agreement(site, AgreeResponse.from_bytes(data))
            if len(attempt.agreed) == attempt.plan.quorum:
                quorum_at.append(time.monotonic() - started)

        def enough() -> bool:
            if len(attempt.agreed) == len(attempt.in_sum):
                return True
            grace = max(2 * quorum_at[0], quorum_at[0] + _LEAST_GRACE_SECONDS) if quorum_at else seconds
            return time.monotonic() - started > grace

        return self.requests.ask(attempt.agree_requests(), take, enough, seconds)

    def _ask_to_open(self, deaf: dict[str, str], seconds: float) -> None:
        """Ask the list's sites for their shares until every secret has enough. Add the sites that revealed no shares to
        `deaf`, with the reasons."""
        attempt, end = self.unmasking, time.monotonic() + seconds
        wanted = attempt.open_requests()
        take: Callable[[str, bytes], None] = lambda site, data: attempt.take_opening(  # noqa: E731
            site, OpenResponse.from_bytes(data)
        )
        for _ in range(_OPEN_TRIES):
            failed = self.requests.ask(wanted, take, lambda: not attempt.wanting, max(end - time.monotonic(), 1.0))
            deaf |= failed
            for site in wanted.keys() - failed.keys():
                deaf.pop(site, None)  # it has answered after all
            wanted = {site: wanted[site] for site in failed}
            if not (attempt.wanting and wanted and time.monotonic() < end):
                break

    @override
    def _read(self, data: Buffer, ctx: RoundContext) -> tuple[envelope.DecodedMessage, AcceptedUpload, float]:
        message, vector, attached = self.codec.receive(data, ctx.address)
        self.unmasking.add(ctx.client, vector, attached)
        self.scalars[ctx.client] = dict(message.payload.scalars)
        return message, AcceptedUpload(Payload({}, scalars=message.payload.scalars), 1, ctx), 0.0

    @override
    def _report(self, upload: AcceptedUpload) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class ServerSecAgg:
    """Secure aggregation of one run.

    Attributes:
        coordinator: manages the sites' keys.
        config: the run config's section `secure`.
        claim: the privacy claim of the run, whose noise may be in the sum.
    """

    exchange: MessageExchange
    coordinator: server.SecAggCoordinator
    config: SecureConfig
    claim: PrivacyGuarantee | None = None

    @classmethod
    def from_config(
        cls,
        exchange: MessageExchange,
        config: SecureConfig,
        run: str,
        claim: PrivacyGuarantee | None,
        config_digest: str,
        app: str,
    ) -> ServerSecAgg:
        """Build it from a run's config. Raises ConfigError if the roster cannot be read."""
        coordinator = server.SecAggCoordinator(
            run, secagg_config_of(config), config_digest, read_roster(config.roster), app
        )
        return cls(exchange, coordinator, config, claim)

    def plan_entries(self, cohort: Sequence[str], ctx: RoundContext) -> EntryTable | None:
        """Return the table that assigns a round's entries to sites, drawn with the server's context for the round."""
        return entry_plan.plan_entries(self.exchange, self.config, cohort, ctx)

    def distribute_keys(self, requests: SecAggRequests) -> dict[str, str]:
        """Ask every connected site without an unused prekey for one. Return the reasons for sites that gave none."""
        coordinator = self.coordinator
        failed = {site: why for site, why in coordinator.expelled.items() if site in requests.nodes}
        known = coordinator.ready.keys() | failed.keys()
        asked = dict.fromkeys((site for site in requests.nodes if site not in known), coordinator.request())
        failed |= requests.ask(
            asked, lambda site, data: coordinator.admit(site, KeysResponse.from_bytes(data)), lambda: False
        )
        refused = coordinator.refusals(requests.round)
        return failed | {site: why for site, why in refused.items() if site in requests.nodes}

    def check_cohort(self, sites: int) -> None:
        """Raise QuorumError if the sites would refuse every plan for a cohort of this size."""
        self.coordinator.settings.check_cohort(sites)
        self.coordinator.settings.graph(sites)

    def is_lost(self, requests: SecAggRequests, quorum: int) -> bool:
        """Return whether too few sites are left for another sum, because the others have already agreed to a sum."""
        refused = self.coordinator.refusals(requests.round).keys() & requests.nodes.keys()
        left = self.coordinator.ready.keys() & requests.nodes.keys() - refused
        return not self._is_enough(len(left), quorum) and self._is_enough(len(left) + len(refused), quorum)

    def _is_enough(self, sites: int, quorum: int) -> bool:
        try:
            self.check_cohort(sites)
        except QuorumError:
            return False
        return sites >= quorum

    def open_requests(
        self, reception: Reception, nodes: Mapping[str, int], address: MessageAddress, round_: int, config: ConfigRecord
    ) -> SecAggRequests:
        """Return one attempt's requests to these sites, before any is sent."""

        def order(ctx: RoundContext) -> ConfigRecord:
            return round_instruction(self.exchange, address.run, ctx, SECONDS)

        return SecAggRequests(reception, nodes, order, round_, address, config)

    def resume(
        self, pending: PendingSum, clear: RoundAttempt, requests: SecAggRequests, server_ctx: RoundContext
    ) -> SecureRoundAttempt:
        """Return the attempt whose list was closed before the server restart."""
        unmasking, tally = pending.unmasking, clear.tally
        plan = unmasking.plan
        tally.accepted += unmasking.uploads
        tally.turns |= pending.turns
        tally.failed |= dict.fromkeys(unmasking.silent, "no upload before the server restart")
        if unmasking.table:
            server_ctx = replace(server_ctx, entries=EntryTable.from_text(unmasking.table))
        own = {f.name: getattr(clear, f.name) for f in fields(RoundAttempt)}
        return SecureRoundAttempt(
            **own, requests=requests, unmasking=unmasking,
            codec=MaskedUploadCodec.from_exchange(self.exchange, clear.round, plan.bits, self.claim),
            coordinator=self.coordinator, server_ctx=server_ctx,
            scalars={site: dict(scalars) for site, scalars in pending.scalars.items()},
            is_resumed=True,
        )  # fmt: skip

    def mask(
        self,
        clear: RoundAttempt,
        requests: SecAggRequests,
        server_ctx: RoundContext,
        pending: PendingSumStore | None = None,
    ) -> RoundAttempt:
        """Return the attempt with masked uploads. All its sites have prekeys. An attempt with an empty cohort is over.

        Raises:
            QuorumError: the sites would refuse every plan for this cohort.
        """
        if not clear.contexts:
            requests.count(clear.tally)
            return clear
        coordinator, cohort = self.coordinator, [ctx.client for ctx in clear.contexts]
        number = max(coordinator.next_attempt(clear.round, cohort), clear.address.attempt)
        address = replace(clear.address, attempt=number)
        contexts = [replace(ctx, address=replace(ctx.address, attempt=number)) for ctx in clear.contexts]
        broadcast, table = "", server_ctx.entries
        if self.exchange.method.sends_same_broadcast:
            # `build_messages` packs it again, because the plan is needed first.
            parts = self.exchange.packed(clear.server, contexts[0]).parts
            broadcast = broadcast_digest(header.digest_of_parts(parts))
            del parts
        attempt = coordinator.attempt(
            clear.round, number, cohort, broadcast, table.to_text() if table else "", table.digest if table else ""
        )
        requests.address = address
        codec = MaskedUploadCodec.from_exchange(self.exchange, clear.round, attempt.plan.bits, self.claim)
        own = {f.name: getattr(clear, f.name) for f in fields(RoundAttempt)}
        own |= {"address": address, "contexts": contexts}
        roster = SigningKeyRoster(signing_keys=dict(coordinator.roster)).to_bytes().decode()
        return SecureRoundAttempt(
            **own, requests=requests, unmasking=attempt, codec=codec, coordinator=coordinator,
            server_ctx=server_ctx, roster=roster if coordinator.roster else "", pending=pending,
        )  # fmt: skip


def read_roster(path: str) -> dict[str, str]:
    """Return all sites' signing keys by name, from the file written by `fedveil members roster`; {} for "".

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path:
        return {}
    try:
        return dict(SigningKeyRoster.from_bytes(Path(path).expanduser().read_bytes()).signing_keys)
    except (OSError, WireError) as error:
        raise ConfigError(
            f"secure.roster: cannot read {path} ({error}); name a file written by fedveil members roster"
        ) from None
