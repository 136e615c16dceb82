"""A complete federation in one process, without Flower: the same contract, the same codecs, the same draws.

It is for tests, research and benchmarks. Every message is encoded and decoded as over the wire. With
`run.deterministic = true`, the final global weights are bit-identical to those of the same run over gRPC, if both have
the same bound on a site's weight (`max_weight_fraction`).
"""

from __future__ import annotations

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
OnMessage = Callable[[bytes, RoundContext, Direction], None]  # called for an upload before the server reads it


@dataclass
class InProcessFederation:
    """A server, its sites and the messages between them.

    Attributes:
        exchange: the method for its spec.
        config: the run config; only the sections cohort, aggregate, secure, run and dp are read.
        trainer_for: returns a site's trainer for one round.
        sites: names of the sites.
        server: the server's state.
        last_cohort: sites in the last round.
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
        private_bytes: memory limit for the sites' private states; the rest goes to temporary files.
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
    private: ClientStateCache = field(init=False)

    def __post_init__(self) -> None:
        self.private = ClientStateCache(self.private_bytes)
        self._dp = DpSgdConfig.from_config(self.config.dp)
        self._claim = guarantee_of(self.exchange.method, self.config)
        check_class_names(self._claim, self.config)
        check_seeded(self._claim.budget if self._claim else None, self.config.run.deterministic)
        self.exchange = replace(self.exchange, optimizer=ServerOptimizer.from_config(self.config.server))
        aggregation_rules.check_server_optimizer(self.exchange)
        aggregation_rules.check_rule(self.exchange, self.config.aggregate)
        aggregation_rules.check_secure(self.config.secure, self.config.aggregate, self.config.cohort)
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
        """Run one round: draw a cohort, exchange messages with each site in it, and update the server."""
        chosen = aggregation_rules.draw_cohort(self.sites, self.config.cohort.fraction, self._server_secret, round_)
        self.private.discard()
        self.cohort, self.cut, self.left_out = chosen, {}, []
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

    def _uploads(self, round_: int, chosen: list[str]) -> Iterator[AcceptedUpload]:
        for site in [site for site in chosen if site not in self.silent]:
            up = self._turn(round_, site, self.exchange.participate)
            message = self.exchange.receive(up, round_, site=site)
            self.reports[site], self.num_examples[site] = message.report, message.num_examples
            ctx = self._context(round_, site, self._server_secret)
            yield AcceptedUpload(message.payload, message.num_examples, ctx, message.report)

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

    def _turn(self, round_: int, site: str, participate: Participate, entries: EntryTable | None = None) -> bytes:
        """Run one client round and return its upload. Count and record the bytes of the broadcast and the upload."""
        down = self.exchange.broadcast(self.server, self._context(round_, site, self._server_secret, entries))
        ctx = self._context(round_, site, self._client_secrets[site])
        trainer = self.trainer_for(site, ctx)
        if self.config.dp.unit_column and not isinstance(trainer, UnitTrainer):
            raise ConfigError(
                f"dp.unit-column: expected a UnitTrainer for every site, found {type(trainer).__name__}; pass a "
                "UnitTrainer"
            )
        if self._dp:
            trainer = NoisyTrainer(trainer.spec, trainer.rows, self._dp, ctx)
        state, parts = participate(down, self.private.get(site), trainer, ctx, ctx.new_turn())
        self.private.stage(site, state)
        up = b"".join(parts)
        self.download_bytes += len(down)
        self.upload_bytes += len(up)
        if self.tap:
            self.tap.write(down, round_, 0, site, "down")
            self.tap.write(up, round_, 0, site, "up", accepted=True)
        if self.on_message:
            self.on_message(down, ctx, "down")
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
            raise ConfigError(f"sites: expected those of the checkpoint ({known}), found {', '.join(self.sites)}")
        self.server, self.participated = server, set(participated)
        self._server_secret = bytes.fromhex(secrets[""])
        self._client_secrets = {site: bytes.fromhex(secrets[site]) for site in self.sites}
        for site, state in private.items():
            self.private[site] = state

    def models(self, site: str | None = None) -> Mapping[str, Weights]:
        """Return the current models by view; with `site`, also that client's model."""
        return self.exchange.method.models(self.server, self.private.get(site) if site else None)
