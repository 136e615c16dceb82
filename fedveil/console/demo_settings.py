"""The settings and arms of `fedveil demo`, and the attack figures from earlier demos. Does not import torch.

The settings were chosen so that attacks succeed: each site trains four times on 64 examples. With fewer passes over
more examples, one method's figures vary as much between runs as they do between two methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil import paths
from fedveil.config import RunConfig

DATA = paths.find_folder("data/e2e")
ROUNDS, SITES = 2, 3
ATTACKED = 64  # members of each site, and non-members
SETTINGS: Mapping[str, Any] = {
    "task.evaluation": str(DATA),
    "task.max-tokens": 96,  # noise needs a length that does not depend on the rows
    "task.examples-per-site": 64,
    "train.epochs": 2,
    "train.max-steps": 0,
    "train.batch-size": 8,
    "train.learning-rate": 3e-3,
    "evaluate.eval-examples": 40,
    "evaluate.generate": "never",
    "run.capture-messages": True,
}
# 0.94 gives an epsilon of 8 (delta 1e-5) for a site with 64 examples, batches of 8, and 2 rounds of 16 steps.
DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "secure": {"secure.enabled": True},
    "dp": {"dp.clip-norm": 1.0, "dp.noise-multiplier": 0.94, "dp.learning-rate": 0.1, "dp.epsilon": 8.0},
}
METHODS = "fedavg,fedrand,fedavg+secure,fedavg+dp"

# Keys that differ between two unchanged demos.
_OF_THE_RUN = {"method.name", "run.dir", "run.name", "task.evaluation", "cohort.min-sites"}


@dataclass(frozen=True)
class EarlierRange:
    """Lowest and highest mean over the sites, in percent, across earlier runs of one arm, each with other members."""

    low: float
    high: float
    runs: int


# Measured in one process; to remeasure: `fedveil bench demo/seeds`.
EARLIER_RANGES: Mapping[str, EarlierRange] = {
    "fedavg": EarlierRange(96, 99, 16),
    "fedrand": EarlierRange(65, 92, 6),
    "fedavg-secure": EarlierRange(83, 93, 16),
    "fedavg-dp": EarlierRange(46, 62, 16),
    "ffa_lora": EarlierRange(93, 98, 16),
}
DRAWN = {"fedrand"}  # arms whose random draws move the figure by more than a few points


def has_demo_settings(config: Mapping[str, Any]) -> bool:
    """Return whether a run's config, by flat key, equals the unchanged config of one of the demo's arms."""
    plain = {**RunConfig().flat(), **SETTINGS, "run.rounds": ROUNDS, "cohort.sites": SITES}
    return any(
        all(config.get(key) == value for key, value in (plain | dict(defense)).items() if key not in _OF_THE_RUN)
        for defense in DEFENSES.values()
    )
