"""The settings of a run's loop, in one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.config import AggregateConfig, CohortConfig, RunConfig, SecureConfig
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.evaluation import ModelSelection
from fedveil.server_app.upload_validation import UploadLimits


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run's loop.

    Attributes:
        cohort: fraction, quorum, deadline, repeats, and what one site may count for.
        aggregate: what is made of a round's uploads.
        seed, deterministic: with `deterministic` every draw follows from the seed, and replies are added up in the
            order of the sites' names, not in the order in which they arrive.
        name: of the run; sites keep their private state under it.
        method: the name by which sites find the method; "" stands for the name of the file that defines it.
        tap: store every message in the run folder.
        limits: of the intake gate.
        secure: whether the server sees single uploads, and how they are hidden else.
        choice: what the scores decide: the model that the run ends with, and when it stops; None: nothing.
        config: the run config by key, which a resumed run must have again; {} for a caller that has none.
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

    @property
    def quorum(self) -> int:
        """The accepted uploads that a round needs."""
        least = self.cohort.min_sites
        return max(least, self.secure.min_sites) if self.secure.enabled else least

    def check(self, exchange: MessageExchange) -> None:
        """Raises ConfigError for a rule that the method or the cohort do not allow."""
        aggregation_rules.check_rule(exchange, self.aggregate)
        aggregation_rules.check_cohort(self.secure, self.aggregate, self.cohort)

    @classmethod
    def from_config(cls, config: RunConfig, name: str, choice: ModelSelection | None = None) -> RunSettings:
        """The settings that a run config asks for."""
        run = config.run
        return cls(
            config.cohort, config.aggregate, run.seed, run.deterministic, name, config.method.name,
            run.capture_messages, config=config.flat(), secure=config.secure, choice=choice,
        )  # fmt: skip
