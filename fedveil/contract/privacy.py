"""Privacy budgets, and plans of how often training samples records. It needs neither torch nor dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from fedveil.errors import ConfigError

__all__ = [
    "LEAST_DELTA",
    "OLD_OWN_SHARE",
    "OLD_SUMMED",
    "OWN_SHARE",
    "SUMMED",
    "UNTIMED",
    "Adjacency",
    "DistributableGuarantee",
    "PrivacyBudget",
    "PrivacyGuarantee",
    "Sampling",
    "SamplingPlan",
    "Spent",
    "Step",
    "SummableNoise",
    "check_batch",
    "check_claim",
    "check_delta",
    "check_epsilon",
    "check_number",
    "check_sampling",
    "check_seeded",
    "is_poisson_sampled",
    "joint_budget",
    "legacy_step",
    "stated_guarantee",
]

Sampling = Literal["poisson", "disjoint", "fixed"]


class Adjacency(StrEnum):
    """The relation of the two data sets that an epsilon compares. An epsilon without it means nothing.

    `ZERO_OUT` compares a record with one that adds nothing to any sum. The number of records is the same in both data
    sets, because every upload carries it.
    """

    ZERO_OUT = "zero-out"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class PrivacyBudget:
    """The most that one record of a site may be charged.

    Attributes:
        epsilon: no record is charged more than this; infinite if charges are
        delta: the delta at which epsilon is stated.
        neighbours: the relation for which both are stated.
        nominal: an epsilon that the method was given but does not guarantee; None if there is none.
        server_trusted: the server sees values before the noise is added; epsilon against the server is infinite.
    """

    epsilon: float
    delta: float
    neighbours: Adjacency
    nominal: float | None = None
    server_trusted: bool = False

    @property
    def asked(self) -> bool:
        """Return whether the run asks for an epsilon, guaranteed or nominal."""
        return self.epsilon < math.inf or self.nominal is not None


class Step(NamedTuple):
    """One use of a record.

    Attributes:
        kind: "gaussian", "poisson", "fixed", `SUMMED`, `OWN_SHARE`, `OLD_SUMMED` or `OLD_OWN_SHARE`.
        examples, batch: the site's, and those of a batch; 0 without sampling.
        multiplier: z.
        variation: for noise in a sum, the total variation distance between one sum and the continuous mechanism; 1 if
            it is not known.
    """

    kind: str
    examples: int
    batch: int
    multiplier: float
    variation: float = 0.0


SUMMED, OWN_SHARE = "summed", "own share"  # noise in a sum: all of it, and the site's part
OLD_SUMMED, OLD_OWN_SHARE = "summed before version 4", "own share before version 4"  # with another unit of z
LEAST_DELTA = 1e-10
Spent = Mapping[Step, int]  # how often each step was taken
UNTIMED = "An epsilon with Poisson sampling assumes a server that does not time the site."


@dataclass(frozen=True)
class SamplingPlan:
    """A plan of how often the training samples one site's records.

    Attributes:
        rounds: participations of the site.
        steps: noisy steps per participation.
        batch: the configured examples per step, by which a step's sum is divided.
        examples: examples of the site.
        neighbours: the relation that the epsilon will be stated for.
    """

    rounds: int
    steps: int
    batch: int
    examples: int
    neighbours: Adjacency

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "batch", "examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1, found {getattr(self, name)}")
        check_batch(self.batch, self.examples)


@runtime_checkable
class PrivacyGuarantee(Protocol):
    """A promise of differential privacy, made by a method that adds noise itself or by `dp.*` in the run config."""

    @property
    def budget(self) -> PrivacyBudget:
        """Return the most that a record of a site may be charged; the site's ledger enforces it."""
        ...

    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return the charge over the plan for the site's most often sampled record."""
        ...


@dataclass(frozen=True)
class SummableNoise:
    """The noise that a guarantee needs on an upload, described so that it can be added to the sum of uploads instead.

    Attributes:
        multiplier: z, of the noise on the sum.
        part: how far adding or removing one example moves an upload, in the upload's unit; replacing one
            moves it twice as far.
        kept: multipliers of the noise that stays at the site, on the same use of the examples.
        sampling, across_rounds: the values that the accountant expects.
    """

    multiplier: float
    part: float
    kept: tuple[float, ...] = ()
    sampling: Sampling = "poisson"
    across_rounds: bool = False


@runtime_checkable
class DistributableGuarantee(PrivacyGuarantee, Protocol):
    """A privacy guarantee whose noise may be added in the sum."""

    def summable(self, batch: int, most_steps: int) -> SummableNoise:
        """Return the noise of uploads under this guarantee, with train.batch-size and train.max-steps.

        Raises:
            ConfigError: another step would use examples at a point without noise, or the effect of an example on the
            upload is not known.
        """
        ...


def is_poisson_sampled(charges: Iterable[Step]) -> bool:
    """Return whether the epsilon of these steps relies on Poisson sampling of the batches."""
    return any(
        step.kind == "poisson" or (step.kind not in ("gaussian", "fixed") and step.examples > 0) for step in charges
    )


def legacy_step(step: Step) -> Step:
    """Return a step of a ledger of version 3 or older with the kind that its unit of z has now.

    Those ledgers do not say how far the noise in a sum is from a continuous one. Their z may be in units of half the
    distance between a record and the one that replaces it, which rounding makes smaller than a record's own part.
    """
    return step._replace(kind={SUMMED: OLD_SUMMED, OWN_SHARE: OLD_OWN_SHARE}.get(step.kind, step.kind))


def joint_budget(*multipliers: float) -> float:
    """Return the z of one Gaussian release that costs as much as these together: z^-2 = sum z_i^-2; 0 if any is 0."""
    return 0.0 if min(multipliers) == 0 else sum(z**-2 for z in multipliers) ** -0.5


def check_batch(batch: int, examples: int) -> None:
    """Raise ConfigError for a batch with more examples than the site has."""
    if batch > examples:
        raise ConfigError(
            f"train.batch-size: expected at most the site's {examples} examples, found {batch}; lower it, or leave "
            "the site out"
        )


def check_number(name: str, value: float, zero: bool = False) -> None:
    """Raise ConfigError unless `value` is finite and above 0; with `zero` it may also be 0."""
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ConfigError(f"{name}: expected a finite number {'of at least' if zero else 'above'} 0, found {value}")


def check_epsilon(epsilon: float) -> None:
    """Raise ConfigError unless `epsilon` is a finite number above 0."""
    if not 0 < epsilon < math.inf:
        raise ConfigError(
            f"epsilon: expected a finite number above 0, found {epsilon}; leave it out for a run without one"
        )


def check_delta(delta: float) -> None:
    """Raise ConfigError unless `delta` is at least 1e-10, below which the accountant's rounding shows, and below 1."""
    if not LEAST_DELTA <= delta < 1:
        raise ConfigError(f"delta: expected at least {LEAST_DELTA:g} and less than 1, found {delta}; 1e-5 is usual")


def check_sampling(sampling: Sampling, neighbours: Adjacency) -> None:
    """Raise ConfigError for batches of a fixed size under zero-out, for which no accountant is known."""
    if sampling == "fixed" and neighbours is Adjacency.ZERO_OUT:
        raise ConfigError(
            f'sampling: expected "poisson" or "disjoint" under {neighbours.value}, found "fixed", for which no epsilon '
            f"is known; use dp.adjacency = {Adjacency.REPLACE_ONE.value}"
        )


def check_claim(epsilon: float | None, delta: float, sampling: Sampling, neighbours: Adjacency) -> None:
    """Raise ConfigError unless the accountant covers a guarantee with these values."""
    check_delta(delta)
    check_sampling(sampling, neighbours)
    if epsilon is not None:
        check_epsilon(epsilon)


def check_seeded(budget: PrivacyBudget | None, deterministic: bool) -> None:
    """Raise ConfigError if a deterministic run asks for an epsilon."""
    if deterministic and budget is not None and budget.asked:
        raise ConfigError(
            "run.deterministic: expected false with an epsilon, found true: seeded noise gives no protection; remove "
            "one of the two"
        )


def stated_guarantee(epsilon: float, delta: float, neighbours: Adjacency) -> str:
    """Return the text that accompanies an epsilon in every report."""
    value = "infinite" if math.isinf(epsilon) else f"{epsilon:.4g}"
    return f"epsilon {value} at delta {delta:g} ({neighbours.value})"
