"""The settings of a run's round loop, in one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.config import AggregateConfig, CohortConfig, RunConfig, SecureConfig, ServerConfig
from fedveil.errors import ConfigError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.evaluation import ModelSelection
from fedveil.server_app.upload_limits import UploadLimits


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run's round loop.

    Attributes:
        cohort: fraction, quorum, deadline, retries, and the maximum weight of one site.
        aggregate: how a round's uploads are aggregated.
        seed, deterministic: if `deterministic`, every draw depends only on the seed, and replies are added up in the
            order of the sites' names, not in the order of arrival.
        name: name of the run; sites store their private state under it.
        method: the name by which sites find the method; "" means the name of the method's file.
        tap: store every message in the run folder.
        limits: the limits of the upload validation.
        secure: whether the server sees individual uploads and, if not, how they are hidden.
        server: the server optimizer and its constants.
        choice: how scores decide on the final model and the end of the run, or None if they do not.
        config: the run config by key, which a resumed run must match; {} if the caller has none.
    """

    cohort: CohortConfig = field(default_factory=CohortConfig)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    seed: int = 0
    deterministic: bool = False
    name: str = "run"
    method: str = ""
    tap: bool = False
    limits: UploadLimits = field(default_factory=UploadLimits)
    config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    secure: SecureConfig = field(default_factory=SecureConfig)
    choice: ModelSelection | None = None
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def quorum(self) -> int:
        """Return the number of accepted uploads that a round needs; with cohort.buffer-size, also that it takes."""
        least = self.cohort.buffer_size or self.cohort.min_sites
        return max(least, self.secure.min_sites) if self.secure.enabled else least

    def check(self, exchange: MessageExchange) -> None:
        """Raise ConfigError for an aggregation rule or a buffer that the method or the cohort does not allow."""
        aggregation_rules.check_rule(exchange, self.aggregate)
        aggregation_rules.check_server_optimizer(exchange)
        aggregation_rules.check_cohort(self.secure, self.aggregate, self.cohort)
        aggregation_rules.check_entries(exchange.method, self.secure, self.cohort)
        aggregation_rules.check_buffer(exchange, self.cohort, self.aggregate)
        if self.cohort.buffer_size and self.deterministic:
            raise ConfigError(
                "run.deterministic: with cohort.buffer-size on a server, the result depends on the order in which "
                "uploads arrive; set run.deterministic to false, or run in one process (fedveil.local), where a "
                "simulated clock decides"
            )

    @classmethod
    def from_config(cls, config: RunConfig, name: str, choice: ModelSelection | None = None) -> RunSettings:
        """Return the settings from a run config."""
        run = config.run
        return cls(
            config.cohort, config.aggregate, run.seed, run.deterministic, name, config.method.name,
            run.capture_messages, config=config.flat(), secure=config.secure, choice=choice,
            server=config.server,
        )  # fmt: skip
