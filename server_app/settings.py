"""What a run's loop has to know of the run config, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedveil.config import CohortConfig, RunConfig
from fedveil.server_app.intake import Limits


@dataclass(frozen=True)
class RunSettings:
    """How a run is run.

    Attributes:
        cohort: fraction, quorum, deadline, repeats.
        seed, deterministic: with `deterministic` every draw follows from the seed, and replies are folded in the order
            of the sites' names instead of the order they come in.
        name: under which sites keep their private state.
        method: the name by which sites find the method; "": that of the file that defines it.
        tap: store every message in the run folder.
        limits: what the intake gate lets in.
    """

    cohort: CohortConfig = field(default_factory=CohortConfig)
    seed: int = 0
    deterministic: bool = False
    name: str = "run"
    method: str = ""
    tap: bool = False
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, config: RunConfig, name: str) -> RunSettings:
        """Those of a run config."""
        run = config.run
        return cls(config.cohort, run.seed, run.deterministic, name, config.method.name, run.tap)
