"""How much privacy a run may cost a record, and how often it looks at one. Needs neither torch nor dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from fedveil.errors import ConfigError

Sampling = Literal["poisson", "disjoint", "fixed"]


class Neighbours(StrEnum):
    """Which two data sets an epsilon compares. An epsilon without this relation means nothing."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Budget:
    """What one record of a site may be charged.

    Attributes:
        epsilon: no record is charged more than this; infinite where charges are only counted.
        delta: of (epsilon, delta).
        neighbours: the relation that both are stated for.
        nominal: an epsilon that the method was given but does not keep; None where there is none.
        server_trusted: the server sees values before the noise; against the server epsilon is infinite.
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


Step = tuple[str, int, int, float]  # one look at a record: kind, rows of the site, rows of a batch, z
SUMMED, OWN_SHARE = "summed", "own share"  # kinds of a look at noise that is in a sum: all of it, and the site's part
Spent = Mapping[Step, int]  # how often each step was taken


@dataclass(frozen=True)
class Plan:
    """How often the records of one site are looked at.

    Attributes:
        rounds: participations of the site.
        steps: noisy steps a participation.
        batch: the configured rows of a step, by which its sum is divided.
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


@runtime_checkable
class Claim(Protocol):
    """A promise of differential privacy, made by a method that adds noise itself or by `dp.*` in the run config."""

    @property
    def budget(self) -> Budget:
        """What a record of a site may be charged; the site's ledger enforces it."""
        ...

    def privacy_spent(self, plan: Plan) -> Spent:
        """What the most looked-at record of a site is charged over the plan."""
        ...


@dataclass(frozen=True)
class Summable:
    """What a claim's noise on an upload must be, so that it can be added in the sum of uploads instead.

    Attributes:
        multiplier: z, on what is summed.
        part: by how much one row, added or removed, moves an upload, in the upload's unit; replaced, by twice as much.
        kept: multipliers of noise on the same look at the rows that stays at the site.
        sampling, across_rounds: as the accountant takes them.
    """

    multiplier: float
    part: float
    kept: tuple[float, ...] = ()
    sampling: Sampling = "poisson"
    across_rounds: bool = False


@runtime_checkable
class Distributable(Claim, Protocol):
    """A claim whose noise may be in the sum."""

    def summable(self, batch: int, most_steps: int) -> Summable:
        """Of uploads under this claim, with train.batch-size and train.max-steps.

        Raises:
            ConfigError: another step would look at rows at a point that has no noise in it, or rows move the upload by
                an amount that is not known.
        """
        ...


def joint(*multipliers: float) -> float:
    """The z of the one Gaussian release that costs as much as these together, z^-2 = sum z_i^-2; 0 if any z_i is 0."""
    return 0.0 if min(multipliers) == 0 else sum(z**-2 for z in multipliers) ** -0.5


def check_batch(batch: int, examples: int) -> None:
    """Raises ConfigError for a batch with more rows than the site has."""
    if batch > examples:
        raise ConfigError(
            f"train.batch-size: expected at most the site's {examples} rows, found {batch}; "
            "lower it, or leave the site out"
        )


def check_number(name: str, value: float, zero: bool = False) -> None:
    """Raises ConfigError unless `value` is finite and above 0; with `zero` it may also be 0."""
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ConfigError(f"{name}: expected a finite number {'of at least' if zero else 'above'} 0, found {value}")


def check_epsilon(epsilon: float) -> None:
    """Raises ConfigError unless `epsilon` is a finite number above 0."""
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon: expected a finite number above 0, found {epsilon}; leave it out to go without")


def check_delta(delta: float) -> None:
    """Raises ConfigError unless `delta` is above 0 and below 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta: expected a number above 0 and below 1, found {delta}; 1e-5 is usual")


def check_sampling(sampling: Sampling, neighbours: Neighbours) -> None:
    """Raises ConfigError for batches that depend on the number of rows, under a relation that changes this number."""
    if sampling != "poisson" and neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        raise ConfigError(
            f'sampling: expected "poisson" under {neighbours.value}, found "{sampling}", whose batches all change with '
            f"the number of rows; use neighbours = {Neighbours.REPLACE_ONE.value}"
        )


def check_claim(epsilon: float | None, delta: float, sampling: Sampling, neighbours: Neighbours) -> None:
    """Raises ConfigError unless a claim with these values can be accounted for."""
    check_delta(delta)
    check_sampling(sampling, neighbours)
    if epsilon is not None:
        check_epsilon(epsilon)


def check_seeded(budget: Budget | None, deterministic: bool) -> None:
    """Raises ConfigError if a deterministic run asks for an epsilon."""
    if deterministic and budget is not None and budget.asked:
        raise ConfigError(
            "run.deterministic: expected false with an epsilon, found true: seeded noise protects nobody; leave one of "
            "the two out"
        )


def stated(epsilon: float, delta: float, neighbours: Neighbours) -> str:
    """The text with which every report prints an epsilon."""
    value = "infinite" if math.isinf(epsilon) else f"{epsilon:.4g}"
    return f"epsilon {value} at delta {delta:g} ({neighbours.value})"
