"""The sampling plan that a run config implies for a site, before the run."""

from __future__ import annotations

from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.training.per_example import count_steps


def plan_sampling(
    method: Method, config: RunConfig, neighbours: Adjacency, examples: int, steps: int | None = None
) -> SamplingPlan:
    """Return how often a site with `examples` examples samples them if it takes part in every round.

    Args:
        steps: noisy steps per participation; None to take them from the run config.

    Raises:
        ConfigError: a batch is larger than the site's data, or the config implies no steps.
    """
    train = config.train
    if DpSgdConfig.from_config(config.dp) is None and getattr(method, "exchange", "epoch") == "batch":
        steps = 1  # DP-FPL sends each step's gradient
    elif steps is None:
        steps = method.trainings * count_steps(examples, train.batch_size, train.epochs, train.max_steps)
    return SamplingPlan(config.run.rounds, steps, train.batch_size, examples, neighbours)
