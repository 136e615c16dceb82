"""The learning rate of each step, from train.lr-schedule and train.warmup-ratio, over the whole run.

The curves are from transformers' `get_scheduler` ("constant" with a warm-up is its "constant_with_warmup"). A step's
rate is the curve's value at the middle of the step: step s of S, in round r of R, is at (r + (s + 1/2) / S) / R of
the run. So the round alone determines a site's position on the curve. A repeated or resumed round has the same rates.
Sites with more steps than others cover the same part of the curve in a round, and on a straight section their mean
rate is exactly the same. No step has a rate of 0; otherwise a site's only step in the first round could have no effect.

train.warmup-ratio is a fraction of the run, not a number of rounds: runs with few rounds have warm-ups shorter than a
round.

| case | result |
|---|---|
| a site misses rounds | it continues at the run's current position |
| a method trains twice in a client round | both passes cover the round's part of the curve |
| run.rounds is raised on resume | ConfigError: the curve would jump |
| noisy steps (dp.*), or a method whose clients take no train.* steps | ConfigError before any site is contacted |

Other `get_scheduler` names are not supported: with default arguments, "polynomial" and "cosine_with_restarts" equal the
two curves here, and "inverse_sqrt" counts steps, whose number differs between sites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from fedveil.config import RunConfig
from fedveil.errors import ConfigError

# Ticks in a whole run, regardless of its rounds and steps; integers, so that all sites round in the same way.
_TICKS = 10**9


@final
@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rates of a run.

    Attributes:
        rounds: number of rounds in the whole run.
        peak: train.learning-rate.
        factor: maps ticks since the start of the run to a multiple of the peak.
    """

    rounds: int
    peak: float
    factor: Callable[[int], float]

    @classmethod
    def from_config(cls, config: RunConfig) -> LearningRateSchedule | None:
        """Create the schedule from the run config; None for a constant rate."""
        train = config.train
        if train.lr_schedule == "constant" and not train.warmup_ratio:
            return None
        from transformers import get_scheduler

        name = "constant_with_warmup" if train.lr_schedule == "constant" else train.lr_schedule
        unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scheduler: Any = get_scheduler(name, unused, round(train.warmup_ratio * _TICKS), _TICKS)
        return cls(config.run.rounds, train.learning_rate, scheduler.lr_lambdas[0])

    def rate(self, round_: int, step: int, steps: int) -> float:
        """Return the rate of step `step` of `steps` in a round; both count from 0. Raises ConfigError past the run."""
        if round_ >= self.rounds:
            raise ConfigError(
                f"run.rounds: expected more than {round_} with train.lr-schedule or train.warmup-ratio, found "
                f"{self.rounds}; set it to the number of rounds"
            )
        return self.peak * self.factor((2 * (round_ * steps + step) + 1) * _TICKS // (2 * self.rounds * steps))
