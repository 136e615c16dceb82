"""The settings of a run's loop, in one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.config import AggregateConfig, CohortConfig, RunConfig, SecureConfig
from fedveil.federation import rules
from fedveil.federation.exchange import Exchange
from fedveil.server_app.evaluate import Choice
from fedveil.server_app.intake import Limits


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
    limits: Limits = field(default_factory=Limits)
    config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    secure: SecureConfig = field(default_factory=SecureConfig)
    choice: Choice | None = None

    def check(self, exchange: Exchange) -> None:
        """Raises ConfigError for a rule that the method or the cohort do not allow."""
        rules.check(exchange, self.aggregate)
        rules.check_cohort(self.secure, self.aggregate, self.cohort)

    @classmethod
    def of(cls, config: RunConfig, name: str, choice: Choice | None = None) -> RunSettings:
        """The settings that a run config asks for."""
        run = config.run
        return cls(
            config.cohort, config.aggregate, run.seed, run.deterministic, name, config.method.name, run.tap,
            config=config.flat(), secure=config.secure, choice=choice,
        )  # fmt: skip
