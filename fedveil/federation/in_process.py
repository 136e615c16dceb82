"""A complete federation in one process, without Flower: the same contract, the same codecs, the same draws.

It is for tests, research and benchmarks. Every message is encoded and decoded as over the wire. With
`run.deterministic = true`, the final global weights are bit-identical to those of the same run over gRPC, if both have
the same bound on a site's weight (`max_weight_fraction`).

With `cohort.buffer-size`, a simulated clock decides the order of uploads: each client round of a site takes
`site_seconds`. Uploads that arrive at the same time are added in the order of `sites`, so the run is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fedveil.config import RunConfig
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import Direction
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import check_seeded
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation import aggregation_rules
from fedveil.federation.aggregation_rules import bound_weights
from fedveil.federation.client_states import ClientStateCache
from fedveil.federation.exchange import MessageExchange, Participate
from fedveil.federation.secagg import entry_plan
from fedveil.federation.secagg.in_process import InProcessSecureSums, secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.update_buffer import BufferedExchange, SitesInFlight, describe_discard
from fedveil.ops.krum import MultiKrumAggregator
from fedveil.ops.server_optimizer import ServerOptimizer
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.privacy.guarantee_source import check_class_names, guarantee_of
from fedveil.rng import derive_secret
from fedveil.training.unit_gradients import UnitTrainer
from fedveil.wire.capture import MessageCapture

__all__ = ["InProcessFederation", "OnMessage", "OnRound", "TrainerFor"]

OnRound = Callable[["InProcessFederation", int], None]
TrainerFor = Callable[[str, RoundContext], Trainer]
# Called for an upload before the server reads it; not for one that the server discards as too stale.
OnMessage = Callable[[bytes, RoundContext, Direction], None]


@dataclass
class InProcessFederation:
    """A server, its sites and the messages between them.

    Attributes:
        exchange: the method for its spec.
        config: the run config; only the sections cohort, aggregate, secure, run and dp are read.
        trainer_for: returns a site's trainer for one round.
        sites: names of the sites.
        server: the server's state.
        last_cohort: sites with an upload in the last round.
        cohort: sites in the current round.
        silent: sites whose uploads do not arrive, so that a secure sum is unmasked without them.
        participated: sites with an upload that the server has accepted.
        upload_bytes, download_bytes: total bytes of the run's messages so far.
        reports: each site's last report.
        num_examples: the number of examples each site reported with its last upload; none under secure aggregation.
        cut: the numbers of examples counted for the sites that `max_share` reduced in the last round.
        left_out: sites in the last round whose uploads the rule did not select (multi-krum).
        on_message: called with each message and its context; None means no calls.
        tap: records every message; None means no recording.
        unseen: the keys of the server and sites under secure aggregation; otherwise None.
        max_share: like cohort.max-weight-fraction; by default no limit, because no site here is hostile.
        site_seconds: simulated seconds that each site's client round takes; 1 for a site that is not named.
        clock: simulated seconds since the start of the run.
        asked: sites that were asked in the current round; without cohort.buffer-size, the cohort.
        staleness: server steps between each accepted upload's state and the last round's; empty without
            cohort.buffer-size.
        discarded: sites whose uploads were too stale for the last round, with their bytes and the reason.
        in_flight: the requests that have not ended, with cohort.buffer-size.
        private_bytes: memory limit for the sites' private states; the rest is written to temporary files.
        private: each site's private state; None for a site that never took part.
    """

    exchange: MessageExchange
    config: RunConfig
    trainer_for: TrainerFor
    sites: list[str]
    server: FederatedState
    last_cohort: list[str] = field(default_factory=list)
    cohort: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    participated: set[str] = field(default_factory=set)
    upload_bytes: int = 0
    download_bytes: int = 0
    reports: dict[str, Mapping[str, float]] = field(default_factory=dict)
    num_examples: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    on_message: OnMessage | None = None
    tap: MessageCapture | None = None
    max_share: float = 1.0
    private_bytes: int = 10**9
    site_seconds: Mapping[str, float] = field(default_factory=dict)
    clock: float = 0.0
    asked: list[str] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    discarded: dict[str, tuple[int, str]] = field(default_factory=dict)
    private: ClientStateCache = field(init=False)
    in_flight: SitesInFlight = field(init=False)

    def __post_init__(self) -> None:
        self.private = ClientStateCache(self.private_bytes)
        self.in_flight = SitesInFlight(self.config.cohort.max_staleness, keeps_all=True)
        self._arrivals = dict[str, float]()  # by site in flight: when its upload arrives on the simulated clock
        check_site_seconds(self.site_seconds, self.sites)
        self._dp = DpSgdConfig.from_config(self.config.dp)
        self._claim = guarantee_of(self.exchange.method, self.config)
        check_class_names(self._claim, self.config)
        check_seeded(self._claim.budget if self._claim else None, self.config.run.deterministic)
        self.exchange = replace(self.exchange, optimizer=ServerOptimizer.from_config(self.config.server))
        aggregation_rules.check_server_optimizer(self.exchange)
        aggregation_rules.check_rule(self.exchange, self.config.aggregate)
        aggregation_rules.check_secure(self.config.secure, self.config.aggregate, self.config.cohort)
        aggregation_rules.check_buffer(self.exchange, self.config.cohort, self.config.aggregate, len(self.sites))
        aggregation_rules.check_entries(self.exchange.method, self.config.secure, self.config.cohort, len(self.sites))
        secure = self.config.secure
        self.unseen = (
            InProcessSecureSums(
                "run", secagg_config_of(secure), self.sites, SiteRequirements(colluding=secure.max_colluders)
            )
            if secure.enabled
            else None
        )
        drawn = aggregation_rules.cohort_size(self.config.cohort.fraction, len(self.sites))
        aggregation_rules.check_count(self.config.aggregate, "sites in a cohort", drawn)
        self._server_secret = self._secret("server")
        self._client_secrets = {site: self._secret(f"client:{site}") for site in self.sites}

    def _secret(self, side: str) -> bytes:
        return derive_secret(side, self.config.run.seed, self.config.run.deterministic)

    def run(self, on_round: OnRound | None = None) -> FederatedState:
        """Run all rounds in the config, calling `on_round` after each. Return the last server state."""
        for round_ in range(self.config.run.rounds):
            self.round(round_)
            if on_round:
                on_round(self, round_)
        return self.server

    def round(self, round_: int) -> None:
        """Run one round: draw a cohort, exchange messages with each site in it, and update the server.

        With cohort.buffer-size, a round is one server step, from the uploads that arrive first.
        """
        if self.config.cohort.buffer_size:
            self._step(round_)
            return
        chosen = aggregation_rules.draw_cohort(self.sites, self.config.cohort.fraction, self._server_secret, round_)
        self.private.discard()
        self.cohort, self.asked, self.cut, self.left_out = chosen, chosen, {}, []
        if self.unseen:
            self.server = self._summed_unseen(self.unseen, round_, chosen)
        else:
            uploads = bound_weights(self._uploads(round_, chosen), self.max_share, self.cut.__setitem__)
            sums = aggregation_rules.make_aggregator(self.config.aggregate)
            self.server = self.exchange.aggregate(self.server, uploads, lambda: sums)
            if isinstance(sums, MultiKrumAggregator):
                self.left_out = sorted(set(chosen) - set(sums.chosen))
        self.private.commit()  # only together with the server's state
        self.participated |= set(chosen) - self.silent
        self.last_cohort = chosen
        self.clock += max((self._seconds(site) for site in chosen), default=0.0)

    def _seconds(self, site: str) -> float:
        return self.site_seconds.get(site, 1.0)

    def _step(self, round_: int) -> None:
        """Take one server step: ask all free sites, and wait for the uploads that arrive first.

        A client round is computed when its upload arrives, from the state that the server had when it asked.
        """
        flight = self.in_flight
        flight.begin(round_, self.server)
        self.private.discard()
        self.cut, self.left_out, self.staleness, self.discarded = {}, [], {}, {}
        self.asked = [site for site in self.sites if site not in flight.contexts and site not in self.silent]
        if (there := len(self.asked) + len(flight.contexts)) < (size := self.config.cohort.buffer_size):
            raise ConfigError(
                f"cohort.buffer-size: expected at most {there}, the number of sites that send uploads, found {size}; "
                "lower it"
            )
        for site in self.asked:
            flight.ask(self._context(round_, site, self._server_secret))
            self._arrivals[site] = self.clock + self._seconds(site)
        self.cohort = sorted(flight.contexts)
        sums = aggregation_rules.make_aggregator(self.config.aggregate)
        uploads = bound_weights(self._arriving(), self.max_share, self.cut.__setitem__)
        exchange = BufferedExchange.from_exchange(self.exchange, round_, flight.states)
        self.server = exchange.aggregate(self.server, uploads, lambda: sums)
        if isinstance(sums, MultiKrumAggregator):
            self.left_out = sorted(set(self.staleness) - set(sums.chosen))
        self.private.commit()
        self.participated = (self.participated | set(self.staleness)) - set(self.discarded)
        self.last_cohort = list(self.staleness)

    def _arriving(self) -> Iterator[AcceptedUpload]:
        """Yield uploads in the order of the simulated clock until the buffer is full; discard those too stale.

        The sites asked in this step alone fill the buffer, so the loop ends.
        """
        flight, places = self.in_flight, {site: place for place, site in enumerate(self.sites)}
        while len(self.staleness) < self.config.cohort.buffer_size:
            site = min(flight.contexts, key=lambda site: (self._arrivals[site], places[site]))
            self.clock = max(self.clock, self._arrivals[site])
            ctx = flight.land(site)
            staleness, server = flight.staleness(ctx), flight.states[ctx.round]
            if flight.is_too_stale(ctx):
                up = self._turn(ctx.round, site, self.exchange.participate, server=server, is_accepted=False)
                self.discarded[site] = len(up), describe_discard(staleness, flight.max_staleness)
                continue
            up = self._turn(ctx.round, site, self.exchange.participate, server=server)
            self.staleness[site] = staleness
            yield self._upload(up, ctx)

    def _uploads(self, round_: int, chosen: list[str]) -> Iterator[AcceptedUpload]:
        for site in [site for site in chosen if site not in self.silent]:
            up = self._turn(round_, site, self.exchange.participate)
            yield self._upload(up, self._context(round_, site, self._server_secret))

    def _upload(self, up: bytes, ctx: RoundContext) -> AcceptedUpload:
        """Decode an upload and note the site's report. The server's context names its round and site."""
        message = self.exchange.receive(up, ctx.round, site=ctx.client)
        self.reports[ctx.client], self.num_examples[ctx.client] = message.report, message.num_examples
        return AcceptedUpload(message.payload, message.num_examples, ctx, message.report)

    def _summed_unseen(self, unseen: InProcessSecureSums, round_: int, chosen: list[str]) -> FederatedState:
        server_ctx = replace(self._context(round_, "", self._server_secret), is_new=False)
        entries = entry_plan.plan_entries(self.exchange, self.config.secure, chosen, server_ctx)
        attempt, clear = unseen.begin(round_, 0, chosen, entries), dict[str, Mapping[str, str]]()
        summed = MaskedUploadCodec.from_exchange(self.exchange, round_, attempt.plan.bits, self._claim)
        for site in [site for site in chosen if site not in self.silent]:
            terms = unseen.terms(attempt.plan, attempt.table, self.exchange.method.plans_entries)
            masked = summed.of_site(unseen.sites[site], attempt.plan, terms)
            up = self._turn(round_, site, masked, entries)
            message, vector, attached = summed.receive(up)
            attempt.add(site, vector, attached)
            clear[site] = message.payload.scalars
        if entries is not None:
            entries.require_sum(chosen, attempt.uploads, attempt.plan.least)
        ctx = replace(server_ctx, entries=entries)
        return self.exchange.server_update(self.server, unseen.sums(attempt, summed, clear), ctx)

    def _context(self, round_: int, site: str, secret_: bytes, entries: EntryTable | None = None) -> RoundContext:
        is_new, in_sum = site not in self.participated, self.config.secure.noise == "sum"
        return RoundContext(
            round_,
            site,
            is_new,
            secret_,
            self.config.run.deterministic,
            noise_in_sum=in_sum,
            entries=entries,
            in_secure_sum=self.unseen is not None,
        )

    def _turn(
        self,
        round_: int,
        site: str,
        participate: Participate,
        entries: EntryTable | None = None,
        server: FederatedState | None = None,
        is_accepted: bool = True,
    ) -> bytes:
        """Run one client round and return its upload. Count and record the bytes of the broadcast and the upload.

        Args:
            server: the state to broadcast; None means the current one.
            is_accepted: False for an upload that the server discards; the site's private state then stays.
        """
        sent_state = self.server if server is None else server
        down = self.exchange.broadcast(sent_state, self._context(round_, site, self._server_secret, entries))
        ctx = self._context(round_, site, self._client_secrets[site])
        trainer = self.trainer_for(site, ctx)
        if self.config.dp.unit_column and not isinstance(trainer, UnitTrainer):
            raise ConfigError(
                f"dp.unit-column: every site needs a UnitTrainer, but one has a {type(trainer).__name__}; pass a "
                "UnitTrainer"
            )
        if self._dp:
            trainer = NoisyTrainer(trainer.spec, trainer.rows, self._dp, ctx)
        state, parts = participate(down, self.private.get(site), trainer, ctx, ctx.new_turn())
        if is_accepted:
            self.private.stage(site, state)
        up = b"".join(parts)
        self.download_bytes += len(down)
        self.upload_bytes += len(up)
        if self.tap:
            self.tap.write(down, round_, 0, site, "down")
            self.tap.write(up, round_, 0, site, "up", accepted=is_accepted)
        if self.on_message:
            self.on_message(down, ctx, "down")
            if is_accepted:
                self.on_message(up, ctx, "up")
        return up

    @property
    def secrets(self) -> dict[str, str]:
        """Return the secrets from which the server ("") and each site draw, in hex, for a checkpoint of the run."""
        return {"": self._server_secret.hex()} | {site: of.hex() for site, of in self._client_secrets.items()}

    def restore(
        self,
        server: FederatedState,
        participated: Iterable[str],
        secrets: Mapping[str, str],
        private: Mapping[str, FederatedState | None],
    ) -> None:
        """Resume a run from a checkpoint. Under secure aggregation, the sites draw new keys.

        With cohort.buffer-size, what was in flight is lost: every site is asked again.

        Args:
            server: the server's state.
            participated: the sites with an upload that the server has accepted.
            secrets: the value that `secrets` returned.
            private: each site's private state; None or absent for a site without one.

        Raises:
            ConfigError: the checkpoint belongs to other sites.
        """
        if secrets.keys() != {"", *self.sites}:
            known = ", ".join(sorted(secrets.keys() - {""}))
            raise ConfigError(f"sites: the checkpoint is of {known}, not of {', '.join(self.sites)}")
        self.server, self.participated = server, set(participated)
        self._server_secret = bytes.fromhex(secrets[""])
        self._client_secrets = {site: bytes.fromhex(secrets[site]) for site in self.sites}
        for site, state in private.items():
            self.private[site] = state
        self.in_flight.contexts.clear()

    def models(self, site: str | None = None) -> Mapping[str, Weights]:
        """Return the current models by view; with `site`, also that client's model."""
        return self.exchange.method.models(self.server, self.private.get(site) if site else None)


def check_site_seconds(seconds: Mapping[str, float], sites: Iterable[str]) -> None:
    """Raise ConfigError unless each entry names a site and is a finite number above 0."""
    known = set(sites)
    for site, value in seconds.items():
        if site not in known:
            raise ConfigError(f"site_seconds: {site!r} is not one of the sites ({', '.join(sorted(known))})")
        if not 0 < value < math.inf:
            raise ConfigError(f"site_seconds: expected a finite number above 0 for {site}, found {value!r}")
