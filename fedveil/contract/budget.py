"""What a run asks of its sites' records, and what it may cost. Data only: importable without torch and dp-accounting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fedveil.errors import ConfigError

Sampling = Literal["poisson", "disjoint", "fixed"]


class Neighbours(StrEnum):
    """Which two data sets an epsilon tells apart. An epsilon without one means nothing."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Budget:
    """What one record of a site may be charged.

    Attributes:
        epsilon: no record is charged more than this; infinite where the run only counts.
        delta: of (epsilon, delta).
        neighbours: of both.
        nominal: an epsilon that the method was given but does not keep; None where there is none.
        server_trusted: the server sees what has no noise yet; against it epsilon is infinite.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    nominal: float | None = None
    server_trusted: bool = False

    @property
    def asked(self) -> bool:
        """Whether the run asks for an epsilon, kept or nominal."""
        return self.epsilon < math.inf or self.nominal is not None


@dataclass(frozen=True)
class Plan:
    """How often the records of one site are looked at.

    Attributes:
        rounds: participations of the site.
        steps: noisy steps a participation.
        batch: rows that a step is meant to have, and divides by.
        examples: rows of the site.
        neighbours: the relation that the epsilon will be stated for.
    """

    rounds: int
    steps: int
    batch: int
    examples: int
    neighbours: Neighbours

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "batch", "examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1, found {getattr(self, name)}")
        check_batch(self.batch, self.examples)


def joint(*multipliers: float) -> float:
    """The multiplier of one Gaussian release that is worth these together: z^-2 = sum z_i^-2. 0 where one has no noise."""
    return 0.0 if min(multipliers) == 0 else sum(z**-2 for z in multipliers) ** -0.5


def check_batch(batch: int, examples: int) -> None:
    """Raises ConfigError for a batch that is larger than the site."""
    if batch > examples:
        raise ConfigError(
            f"train.batch-size: expected at most the site's {examples} rows, found {batch}; lower it, or leave the site out"
        )


def check_number(name: str, value: float, zero: bool = False) -> None:
    """Raises ConfigError unless it is finite and above 0, or `zero` and 0."""
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ConfigError(f"{name}: expected a finite number {'of at least' if zero else 'above'} 0, found {value}")


def check_epsilon(epsilon: float) -> None:
    """Raises ConfigError unless it is a finite number above 0."""
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon: expected a finite number above 0, found {epsilon}; leave it out to go without")


def check_delta(delta: float) -> None:
    """Raises ConfigError unless it is between 0 and 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta: expected a number above 0 and below 1, found {delta}; 1e-5 is usual")


def check_sampling(sampling: Sampling, neighbours: Neighbours) -> None:
    """Raises ConfigError for batches whose cut depends on the number of rows, under a relation that changes it."""
    if sampling != "poisson" and neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        raise ConfigError(
            f'sampling: expected "poisson" under {neighbours.value}, found "{sampling}", whose batches all change with the '
            f"number of rows; use neighbours = {Neighbours.REPLACE_ONE.value}"
        )


def check_claim(epsilon: float | None, delta: float, sampling: Sampling, neighbours: Neighbours) -> None:
    """All that must hold of what a method says of itself. Raises ConfigError."""
    check_delta(delta)
    check_sampling(sampling, neighbours)
    if epsilon is not None:
        check_epsilon(epsilon)


def check_seeded(budget: Budget | None, deterministic: bool) -> None:
    """Raises ConfigError where a deterministic run asks for an epsilon."""
    if deterministic and budget is not None and budget.asked:
        raise ConfigError(
            "run.deterministic: expected false with method.fields epsilon, found true: seeded noise protects nobody; leave "
            "one of the two out"
        )


def stated(epsilon: float, delta: float, neighbours: Neighbours) -> str:
    """An epsilon as it is printed everywhere."""
    value = "infinite" if math.isinf(epsilon) else f"{epsilon:.4g}"
    return f"epsilon {value} at delta {delta:g} ({neighbours.value})"
