"""The learning rate of each step: train.lr-schedule and train.warmup-ratio, over the whole run.

The curve is that of transformers' `get_scheduler` ("constant" with a warm-up is its "constant_with_warmup"). A step's
rate is the curve's value in the middle of the step: step s of S, in round r of R, is at (r + (s + 1/2) / S) / R of
the run. So only the round determines a site's position. A repeated or resumed round has the same rates. Sites
with more steps than others cover the same part of the curve in a round, and on a straight section their mean
rate is exactly the same. No step has a rate of 0, as a site's only step of the first round otherwise would.

train.warmup-ratio is a fraction of the run, not a number of rounds: runs of a few rounds have warm-ups shorter than a
round.

| case | result |
|---|---|
| a site that misses rounds | it continues at the run's current position |
| a client round in which a method trains twice | both trainings cover the round's part of the curve |
| run.rounds raised at a resume | ConfigError: the curve would jump |
| noisy steps (dp.*), or a method whose clients make no steps of train.* | ConfigError before any site is contacted |

Other names of `get_scheduler` are not supported: "polynomial" and "cosine_with_restarts" equal the two curves here
unless they get their own arguments, and "inverse_sqrt" counts steps, whose number differs between sites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from fedveil.config import RunConfig
from fedveil.errors import ConfigError

_TICKS = 10**9  # ticks of a whole run, for any rounds and steps: integers, so that all sites round alike


@final
@dataclass(frozen=True)
class LearningRateSchedule:
    """The rates of a run.

    Attributes:
        rounds: number of rounds of the whole run.
        peak: train.learning-rate.
        factor: factor of the peak, by ticks since the run began.
    """

    rounds: int
    peak: float
    factor: Callable[[int], float]

    @classmethod
    def from_config(cls, config: RunConfig) -> LearningRateSchedule | None:
        """Create the schedule of the run config; None for a constant rate."""
        train = config.train
        if train.lr_schedule == "constant" and not train.warmup_ratio:
            return None
        from transformers import get_scheduler

        name = "constant_with_warmup" if train.lr_schedule == "constant" else train.lr_schedule
        unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scheduler: Any = get_scheduler(name, unused, round(train.warmup_ratio * _TICKS), _TICKS)
        return cls(config.run.rounds, train.learning_rate, scheduler.lr_lambdas[0])

    def rate(self, round_: int, step: int, steps: int) -> float:
        """Return the rate of step `step` of `steps` in a round, from 0. Raises ConfigError past the run's rounds."""
        if round_ >= self.rounds:
            raise ConfigError(
                f"run.rounds: expected more than {round_} with train.lr-schedule or train.warmup-ratio, found "
                f"{self.rounds}; set it to the number of rounds"
            )
        return self.peak * self.factor((2 * (round_ * steps + step) + 1) * _TICKS // (2 * self.rounds * steps))
