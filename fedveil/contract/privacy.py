"""Privacy budgets, and plans of how often training samples records. Imports neither torch nor dp-accounting."""

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
    """The relation between the two data sets that an epsilon compares. Without it, an epsilon means nothing.

    `ZERO_OUT` compares a record with a record that adds nothing to any sum. Both data sets have the same number of
    records, because every upload states that number.
    """

    ZERO_OUT = "zero-out"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class PrivacyBudget:
    """The maximum that one record at a site may be charged.

    Attributes:
        epsilon: no record is charged more than this; infinite if charges are not limited.
        delta: the delta at which epsilon is stated.
        neighbours: the adjacency for which epsilon and delta are stated.
        nominal: an epsilon that the method was given but does not guarantee; None if there is none.
        server_trusted: True if the server sees values before noise is added; epsilon against it is then infinite.
    """

    epsilon: float
    delta: float
    neighbours: Adjacency
    nominal: float | None = None
    server_trusted: bool = False

    @property
    def asked(self) -> bool:
        """Return whether the run sets an epsilon, guaranteed or nominal."""
        return self.epsilon < math.inf or self.nominal is not None


class Step(NamedTuple):
    """One use of a record.

    Attributes:
        kind: "gaussian", "poisson", "fixed", `SUMMED`, `OWN_SHARE`, `OLD_SUMMED` or `OLD_OWN_SHARE`.
        examples, batch: numbers of examples at the site and in a batch; 0 without sampling.
        multiplier: z, the noise multiplier.
        variation: for noise in a sum, the total variation distance between one sum and the continuous mechanism; 1 if
            unknown.
    """

    kind: str
    examples: int
    batch: int
    multiplier: float
    variation: float = 0.0


SUMMED, OWN_SHARE = "summed", "own share"  # noise in a sum: the total noise, and the site's part
OLD_SUMMED, OLD_OWN_SHARE = "summed before version 4", "own share before version 4"  # with a different unit of z
LEAST_DELTA = 1e-10
Spent = Mapping[Step, int]  # number of times each step was taken
UNTIMED = "An epsilon with Poisson sampling assumes a server that does not time the site."


@dataclass(frozen=True)
class SamplingPlan:
    """A plan of how often training samples one site's records.

    Attributes:
        rounds: number of participations of the site.
        steps: number of noisy steps per participation.
        batch: the configured examples per step; a step's sum is divided by it.
        examples: number of examples at the site.
        neighbours: the adjacency for which epsilon will be stated.
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
    """A differential privacy guarantee, from a method that adds noise itself or from `dp.*` in the run config."""

    @property
    def budget(self) -> PrivacyBudget:
        """Return the maximum that a record at a site may be charged; the site's ledger enforces it."""
        ...

    def privacy_spent(self, plan: SamplingPlan) -> Spent:
        """Return the total charge under the plan for the site's most frequently sampled record."""
        ...


@dataclass(frozen=True)
class SummableNoise:
    """The noise that a guarantee needs on an upload, described so that it can be added to the sum of uploads instead.

    Attributes:
        multiplier: z, the multiplier of the noise on the sum.
        part: how far adding or removing one example moves an upload, in the upload's unit; replacing an example
            moves it twice as far.
        kept: multipliers of the noise that stays at the site, for the same use of the examples.
        sampling, across_rounds: the values that the accountant expects.
    """

    multiplier: float
    part: float
    kept: tuple[float, ...] = ()
    sampling: Sampling = "poisson"
    across_rounds: bool = False


@runtime_checkable
class DistributableGuarantee(PrivacyGuarantee, Protocol):
    """A privacy guarantee whose noise may be added to the sum."""

    def summable(self, batch: int, most_steps: int) -> SummableNoise:
        """Return the noise for uploads under this guarantee, given train.batch-size and train.max-steps.

        Raises:
            ConfigError: another step would use examples at weights without noise, or the effect of an example on the
            upload is unknown.
        """
        ...


def is_poisson_sampled(charges: Iterable[Step]) -> bool:
    """Return whether the epsilon of these steps relies on Poisson sampling of the batches."""
    return any(
        step.kind == "poisson" or (step.kind not in ("gaussian", "fixed") and step.examples > 0) for step in charges
    )


def legacy_step(step: Step) -> Step:
    """Return a step from a ledger of version 3 or older with the current kind for its unit of z.

    Those ledgers do not record how far the noise in a sum is from continuous noise. Their z may be in units of half the
    distance between a record and its replacement, which rounding makes smaller than the record's own part.
    """
    return step._replace(kind={SUMMED: OLD_SUMMED, OWN_SHARE: OLD_OWN_SHARE}.get(step.kind, step.kind))


def joint_budget(*multipliers: float) -> float:
    """Return the z of one Gaussian release with the same total cost: z^-2 = sum z_i^-2; 0 if any z_i is 0."""
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
            f"epsilon: expected a finite number above 0, found {epsilon}; for a run without an epsilon, leave it out"
        )


def check_delta(delta: float) -> None:
    """Raise ConfigError unless 1e-10 <= `delta` < 1; below 1e-10, the accountant's rounding would show."""
    if not LEAST_DELTA <= delta < 1:
        raise ConfigError(f"delta: expected at least {LEAST_DELTA:g} and less than 1, found {delta}; 1e-5 is typical")


def check_sampling(sampling: Sampling, neighbours: Adjacency) -> None:
    """Raise ConfigError for fixed-size batches under zero-out, because no accountant is known for them."""
    if sampling == "fixed" and neighbours is Adjacency.ZERO_OUT:
        raise ConfigError(
            f'sampling: under {neighbours.value}, no epsilon is known for "fixed"; use "poisson" or "disjoint", or '
            f"dp.adjacency = {Adjacency.REPLACE_ONE.value}"
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
            "run.deterministic: a run with an epsilon cannot be deterministic, because seeded noise gives no "
            "protection; remove one of the two"
        )


def stated_guarantee(epsilon: float, delta: float, neighbours: Adjacency) -> str:
    """Return the text that accompanies an epsilon in every report."""
    value = "infinite" if math.isinf(epsilon) else f"{epsilon:.4g}"
    return f"epsilon {value} at delta {delta:g} ({neighbours.value})"
