"""A round with masked uploads: its keys, its sum, and two exchanges more than a clear-text round.

The parts of secure aggregation that do not depend on Flower are in fedveil/federation/secagg. The server asks for
keys before it draws a cohort, and a prekey is for one attempt. It keeps no keys for a resume: a restarted server
asks every site for new ones. So no key and no context is ever used twice.

| a site ... | what happens |
|---|---|
| provides no keys | it is left out of the cohort; its reason is in the record's `failed` |
| fails in the round | the server assumes that it has lost its keys |
| reveals no shares, or wrong ones | nothing, as long as t others do |
| sent shares that do not reconstruct its secret | the attempt is discarded, and the run continues without it |

| the sum ... | what happens |
|---|---|
| cannot be unmasked, or is impossible for honest sites | the attempt is discarded; `unseen` of the record says why |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
from fedveil.federation.secagg.membership import PrekeyBundle, RunMember, SigningKeyRoster
from fedveil.federation.secagg.messages import UnmaskResponse
from fedveil.federation.secagg.unmasking import UnmaskingAttempt
from fedveil.sanitize import sanitize
from fedveil.server_app.reception import Reception
from fedveil.server_app.round_attempt import REASON_CHARACTERS, RoundAttempt, round_instruction
from fedveil.server_app.secagg_requests import SECONDS, SecAggRequests
from fedveil.wire import envelope


@dataclass(frozen=True)
class SecureRoundAttempt(RoundAttempt):
    """An attempt whose uploads are masked vectors, added up as they arrive.

    Attributes:
        requests: requests to the sites that hold shares.
        unmasking: the sum of the masked vectors, and the shares that unmask it.
        codec: codec of the masked uploads.
        coordinator: manages the sites' keys of the run.
        server_ctx: context for the server's own random draws in the round.
        scalars: values that each site sends in the clear, by site; filled in while the attempt runs.
    """

    requests: SecAggRequests = field(kw_only=True)
    unmasking: UnmaskingAttempt = field(kw_only=True)
    codec: MaskedUploadCodec = field(kw_only=True)
    coordinator: server.SecAggCoordinator = field(kw_only=True)
    server_ctx: RoundContext = field(kw_only=True)
    scalars: dict[str, dict[str, str]] = field(default_factory=dict, kw_only=True)

    @override
    def build_instruction(self, ctx: RoundContext, anchor: str, deadline: float) -> ConfigRecord:
        order = super().build_instruction(ctx, anchor, deadline)
        order["secure"] = self.unmasking.plan.to_bytes().decode()
        return order

    @property
    @override
    def largest_upload(self) -> int:
        return self.codec.largest_upload

    @override
    def aggregate(self, uploads: Iterator[AcceptedUpload]) -> FederatedState | None:
        """Return the next state from the uploads, which are added up as they arrive; None if there is no such sum.

        Below the quorum, no site is asked to reveal shares.
        """
        for _ in uploads:
            continue
        quorum, tally = self.settings.quorum, self.tally
        try:
            if len(self.unmasking.uploads) < quorum:
                raise QuorumError(f"expected at least {quorum} uploads, found {len(self.unmasking.uploads)}")
            if self.server_ctx.entries is not None:
                plan = self.unmasking.plan
                self.server_ctx.entries.require_sum(plan.cohort, self.unmasking.uploads, plan.least)
            return self.exchange.method.server_update(self.server, self._open_sum(), self.server_ctx)
        except (QuorumError, WireError) as error:
            tally.unseen["reason"] = sanitize(str(error), REASON_CHARACTERS)
            log(WARNING, "round %s: no sum: %s", self.round + 1, tally.unseen["reason"])
            for site in self.unmasking.faulty:
                self.coordinator.expel(site)
            return None
        finally:
            self.requests.count(tally)
            for site in tally.failed:  # the site may have lost its keys
                self.coordinator.forget(site)

    def _open_sum(self) -> FixedPointSums:
        """Ask the share holders for their shares and return the sum. Raises QuorumError, WireError."""
        attempt, unseen, membership = self.unmasking, self.tally.unseen, self.unmasking.membership
        unseen |= {"sites": len(attempt.uploads), "holders": membership.count, "threshold": membership.threshold}
        take: Callable[[str, bytes], None] = lambda site, data: attempt.answer(site, UnmaskResponse.from_bytes(data))  # noqa: E731
        unseen["deaf"] = self.requests.ask(attempt.questions(), take, lambda: not attempt.wanting)
        for site, attached in attempt.uploads.items():
            try:
                if attached.next is not None:
                    self.coordinator.keep(site, attached.next)
            except WireError as error:  # the site is asked for another one before the next attempt
                log(WARNING, "round %s: %s: its next prekey: %s", self.round + 1, site, error)
        scalars = {site: self.scalars.get(site, {}) for site in attempt.uploads}
        sums = FixedPointSums(self.codec.slots, self.codec.ring(attempt.plan), attempt.total(), scalars)
        sums.check(self.settings.limits.max_norm)
        return sums

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
        config: the run's section `secure`.
        claim: the privacy claim of the run, whose noise may be in the sum.
    """

    exchange: MessageExchange
    coordinator: server.SecAggCoordinator
    config: SecureConfig
    claim: PrivacyGuarantee | None = None

    @classmethod
    def from_config(
        cls, exchange: MessageExchange, config: SecureConfig, run: str, claim: PrivacyGuarantee | None
    ) -> ServerSecAgg:
        """Build it from a run's config. Raises ConfigError if the roster cannot be read."""
        coordinator = server.SecAggCoordinator(run, secagg_config_of(config), read_roster(config.roster))
        return cls(exchange, coordinator, config, claim)

    def plan_entries(self, cohort: Sequence[str], ctx: RoundContext) -> EntryTable | None:
        """Return the table of who sends which entries in a round, drawn with the server's context of the round."""
        return entry_plan.plan_entries(self.exchange, self.config, cohort, ctx)

    def distribute_keys(self, requests: SecAggRequests) -> dict[str, str]:
        """Distribute keys to every connected site. Return the reasons of the sites that have none."""
        coordinator = self.coordinator
        expelled = {site: why for site, why in coordinator.expelled.items() if site in requests.nodes}
        known = coordinator.members.keys() | expelled.keys()
        hello = dict.fromkeys((site for site in requests.nodes if site not in known), coordinator.hello())
        failed = expelled | requests.ask(hello, lambda site, data: coordinator.admit(site, RunMember.from_bytes(data)))
        try:
            setup = coordinator.settle_on(requests.nodes)
        except QuorumError as error:
            return failed | {site: str(error) for site in requests.nodes if site not in failed}
        lacking = dict.fromkeys((s for s in setup.membership.by_name if s not in coordinator.bundles), setup)
        failed |= requests.ask(lacking, lambda site, data: coordinator.keep(site, PrekeyBundle.from_bytes(data)))
        for site in failed:
            coordinator.forget(site)
        return failed

    def open_requests(
        self, reception: Reception, nodes: Mapping[str, int], address: MessageAddress, round_: int, config: ConfigRecord
    ) -> SecAggRequests:
        """Return the requests to these sites in one attempt, before any is sent."""

        def order(ctx: RoundContext) -> ConfigRecord:
            return round_instruction(self.exchange, address.run, ctx, SECONDS)

        return SecAggRequests(reception, nodes, order, round_, address, config)

    def mask(self, clear: RoundAttempt, requests: SecAggRequests, server_ctx: RoundContext) -> RoundAttempt:
        """Return the attempt with masked uploads. All its sites have prekeys. An attempt without a cohort is over."""
        if not clear.contexts:
            requests.count(clear.tally)
            return clear
        cohort = [ctx.client for ctx in clear.contexts]
        attempt = self.coordinator.attempt(clear.round, clear.address.attempt, cohort)
        codec = MaskedUploadCodec.from_exchange(self.exchange, clear.round, attempt.plan.bits, self.claim)
        own = {f.name: getattr(clear, f.name) for f in fields(RoundAttempt)}
        return SecureRoundAttempt(
            **own, requests=requests, unmasking=attempt, codec=codec, coordinator=self.coordinator,
            server_ctx=server_ctx,
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
            f"secure.roster: expected a file that fedveil members roster has written, found none at {path} ({error})"
        ) from None
