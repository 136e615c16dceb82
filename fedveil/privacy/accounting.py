"""Epsilon from charges, and the noise for a wanted epsilon, by dp-accounting. No other module computes an epsilon.

Noise multipliers are z = (standard deviation of the noise on a sum) / (bound C of one record's part in it), as in
`GaussianDpEvent`. Replacing one record moves the sum by up to 2 C; adding or removing one moves it by up to C.

| event | accountant | how exact |
|---|---|---|
| Gaussian steps only | the analytic Gaussian mechanism: z / sqrt(steps), halved under replace-one | exact |
| with Poisson subsampling | privacy loss distributions | an upper bound, tight to about 1 % |
| with sampling without replacement | Renyi, with every z halved: its bound assumes that the sum moves by C | an upper
  bound |
| the last two together | no accountant takes both: epsilon of each group at delta / 2, added up | an upper bound, by
  basic composition; Gaussian steps count with the Poisson ones |
| sampling without replacement, under add-or-remove-one | none: all batches change with the number of rows | infinite |
| NonPrivate, or z = 0 | - | infinite |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import dp_accounting
from dp_accounting import gaussian_mechanism
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedveil.contract.budget import (
    Neighbours,
    Plan,
    Sampling,
    Spent,
    Step,
    check_delta,
    check_epsilon,
    check_sampling,
)
from fedveil.errors import ConfigError

_RELATION = {
    Neighbours.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Neighbours.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_LARGEST_MULTIPLIER = 1e6
_TOLERANCE = 1e-3  # relative, of a calibrated multiplier; always on the private side


def spent(multiplier: float, sampling: Sampling, plan: Plan, across_rounds: bool) -> Spent:
    """What the most looked-at record of the site is charged over the plan.

    A record is in at most one of the disjoint batches of an epoch. An epoch begins with every participation; with
    `across_rounds`, consecutive rounds instead take consecutive steps of one epoch.
    """
    check_sampling(sampling, plan.neighbours)
    if sampling == "disjoint":
        an_epoch = plan.examples // plan.batch
        steps, begun = (plan.rounds * plan.steps, 1) if across_rounds else (plan.steps, plan.rounds)
        uses = begun * math.ceil(steps / an_epoch)
        return {("gaussian", 0, 0, multiplier): uses}
    if plan.batch == plan.examples:
        return {("gaussian", 0, 0, multiplier): plan.rounds * plan.steps}
    return {(sampling, plan.examples, plan.batch, multiplier): plan.rounds * plan.steps}


def event(charges: Spent) -> Any:
    """The charges as one dp-accounting event."""
    parts = [dp_accounting.SelfComposedDpEvent(_one(*step), count) for step, count in charges.items() if count]
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def _one(kind: str, examples: int, batch: int, multiplier: float) -> Any:
    if multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    if kind == "poisson":
        return dp_accounting.PoissonSampledDpEvent(batch / examples, gaussian)
    if kind == "fixed":
        return dp_accounting.SampledWithoutReplacementDpEvent(examples, batch, gaussian)
    if kind == "gaussian":
        return gaussian
    raise ConfigError(f'sampling: expected "poisson", "fixed" or "gaussian", found "{kind}"')


def epsilon(charges: Spent, delta: float, neighbours: Neighbours) -> float:
    """The smallest epsilon known for these charges; infinite where none is known."""
    check_delta(delta)
    return _epsilon(tuple(sorted((step, count) for step, count in charges.items() if count)), delta, neighbours)


def mean_loss(charges: Spent) -> float:
    """A bound on the mean privacy loss (Kullback-Leibler) of the Gaussian and Poisson-subsampled steps.

    What a privacy loss distribution costs in time and memory grows with it. For one step at rate q, under either
    relation, it is at most 2 q / z^2 (convexity) and 2 q^2 / (1 - q) (e^(1/z^2) - e^(-1/z^2)) (chi-square distance).
    """
    total = 0.0
    for (kind, examples, batch, multiplier), count in charges.items():
        if multiplier == 0:
            return math.inf
        inverse, rate = multiplier**-2, batch / examples if kind == "poisson" else 1.0
        one = 2 * rate * inverse
        if rate < 1 and inverse < 1:  # above it, the other bound is the smaller one or the step is hardly private
            one = min(one, 4 * rate**2 / (1 - rate) * math.sinh(inverse))
        total += count * one
    return total


@lru_cache(maxsize=4096)
def _epsilon(charges: tuple[tuple[Step, int], ...], delta: float, neighbours: Neighbours) -> float:
    kinds = {step[0] for step, _ in charges}
    if any(step[3] == 0 for step, _ in charges):
        return math.inf
    if not charges:
        return 0.0
    if kinds == {"gaussian"}:
        moved = 2 if neighbours is Neighbours.REPLACE_ONE else 1
        together = sum(count / step[3] ** 2 for step, count in charges) ** -0.5
        return float(gaussian_mechanism.get_epsilon_gaussian(together / moved, delta))
    if "fixed" not in kinds:
        return _composed(PLDAccountant(_RELATION[neighbours]), charges, delta)
    if neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        return math.inf
    if "poisson" in kinds:
        groups = [tuple(c for c in charges if (c[0][0] == "fixed") is fixed) for fixed in (True, False)]
        return sum(_epsilon(group, delta / 2, neighbours) for group in groups)
    halved = tuple(((kind, n, b, z / 2), count) for (kind, n, b, z), count in charges)
    return _composed(RdpAccountant(neighboring_relation=_RELATION[neighbours]), halved, delta)


def _composed(accountant: dp_accounting.PrivacyAccountant, charges: Iterable[tuple[Step, int]], delta: float) -> float:
    accountant.compose(event(dict(charges)))
    return float(accountant.get_epsilon(delta))


def multiplier_for(charges: Callable[[float], Spent], wished: float, delta: float, neighbours: Neighbours) -> float:
    """The smallest z, to 0.1 %, whose charges cost at most `wished`. Raises ConfigError if none up to 1e6 does."""
    check_epsilon(wished)
    high = 1.0
    while epsilon(charges(high), delta, neighbours) > wished:
        high *= 2
        if high > _LARGEST_MULTIPLIER:
            raise ConfigError(
                f"epsilon: expected one that noise of at most {high:g} C reaches, found {wished}; raise it"
            )
    low = high / 2
    while low > 1e-6 and epsilon(charges(low), delta, neighbours) <= wished:
        low, high = low / 2, low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(charges(middle), delta, neighbours) <= wished else (middle, high)
    return high
