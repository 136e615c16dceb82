"""Refuse a run whose plan cannot reach a policy's bounds on examples, before a row is looked at or charged.

The bounds hold for what a client round really used (decisions.check_examples). Where the run config alone says that
every client round will miss them, the site refuses at once: else it would train, charge its ledger, and then refuse.

| a client round | uses at most |
|---|---|
| of a method that sends the gradient of one batch | train.batch-size examples |
| of noisy steps (dp.clip-norm), with train.max-steps | train.max-steps times train.batch-size |
| of other training, with train.max-steps | twice as many optimizer steps: a method trains at most twice |
| without train.max-steps | as many as the site has, which the plan does not say |
| of units (dp.unit-column) | as many rows as the drawn units have, which the plan does not say |
"""

from __future__ import annotations

from fedveil.config import RunConfig, parse_toml
from fedveil.errors import PolicyError

# Methods that send one batch's gradient unless exchange = "epoch". A test compares the names with the methods' own.
ONE_BATCH = frozenset({"dp_fpl", "fixed_position", "random_binary"})
_TRAININGS = 2


def require_planned_examples(min_examples: int | None, min_batch: int | None, config: RunConfig) -> None:
    """Raise PolicyError if no client round of this run can use `min_examples`, or steps of `min_batch` examples."""
    most, step = most_examples(config), examples_per_step(config)
    if min_batch is not None and step < min_batch:
        raise PolicyError(
            f"train.batch-size: this run takes steps of at most {step} examples, but this site takes steps of at least "
            f"{min_batch} (min-batch of its policy); raise train.batch-size, or leave the site out"
        )
    if min_examples is not None and most is not None and most < min_examples:
        raise PolicyError(
            f"examples: a client round of this run uses at most {most} examples, but this site takes part with at "
            f"least {min_examples} (min-examples of its policy); raise train.batch-size or train.max-steps, or leave "
            "the site out"
        )


def most_examples(config: RunConfig) -> int | None:
    """Return the largest number of distinct examples in a client round; None if the run config does not bound it."""
    train = config.train
    if config.dp.unit_column:
        return None
    if _sends_one_batch(config):
        return train.batch_size
    if not train.max_steps:
        return None
    return train.max_steps * examples_per_step(config) * (1 if config.dp.clip_norm else _TRAININGS)


def examples_per_step(config: RunConfig) -> int:
    """Return the number of examples in a full step."""
    train = config.train
    whole = config.dp.clip_norm or _sends_one_batch(config)
    return train.batch_size * (1 if whole else train.gradient_accumulation_steps)


def _sends_one_batch(config: RunConfig) -> bool:
    if config.dp.clip_norm or config.method.name not in ONE_BATCH:
        return False
    return bool(parse_toml(config.method.params, "method.params").get("exchange", "batch") == "batch")
