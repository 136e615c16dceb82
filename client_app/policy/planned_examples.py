"""Refuse a run whose plan cannot reach a policy's minimum numbers of examples, before any row is read or charged.

The minimums apply to the examples that a client round has actually used (decisions.check_examples). If the run config
alone shows that no client round can reach them, the site refuses immediately: otherwise it would train, charge its
ledger, and then refuse.

| client round | uses at most |
|---|---|
| a method that sends the gradient of one batch | train.batch-size examples |
| noisy steps (dp.clip-norm), with train.max-steps | train.max-steps times train.batch-size |
| other training, with train.max-steps | the examples of twice as many steps, since a method trains at most twice |
| without train.max-steps | all of the site's examples; the plan does not contain their number |
| units (dp.unit-column) | all rows of the drawn units; the plan does not contain their number |
"""

from __future__ import annotations

from fedveil.config import RunConfig, parse_toml
from fedveil.errors import PolicyError

# Methods that send one batch's gradient unless exchange = "epoch". A test compares this list with the methods.
ONE_BATCH = frozenset({"dp_fpl", "fixed_position", "random_binary"})
MAX_TRAININGS = 2  # of a method in a client round: FedSP alternates between two


def require_planned_examples(min_examples: int | None, min_batch: int | None, config: RunConfig) -> None:
    """Raise PolicyError if no client round in this run can use `min_examples`, or steps of `min_batch` examples."""
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
    """Return the maximum number of distinct examples in a client round; None if the run config does not bound it."""
    train = config.train
    if config.dp.unit_column:
        return None
    if _sends_one_batch(config):
        return train.batch_size
    if not train.max_steps:
        return None
    return train.max_steps * examples_per_step(config) * (1 if config.dp.clip_norm else MAX_TRAININGS)


def examples_per_step(config: RunConfig) -> int:
    """Return the number of examples in a full step."""
    train = config.train
    whole = config.dp.clip_norm or _sends_one_batch(config)
    return train.batch_size * (1 if whole else train.gradient_accumulation_steps)


def _sends_one_batch(config: RunConfig) -> bool:
    if config.dp.clip_norm or config.method.name not in ONE_BATCH:
        return False
    return bool(parse_toml(config.method.params, "method.params").get("exchange", "batch") == "batch")
