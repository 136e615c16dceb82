"""Compute epsilon from charges, and noise for a target epsilon, with dp-accounting. No other module computes bounds.

Noise multipliers are z = (standard deviation of the noise on a sum) / (bound C of one record's part in it), as in
`GaussianDpEvent`. Replacing one record moves the sum by up to 2 C; adding or removing one moves it by up to C.

| event | accountant | how exact |
|---|---|---|
| Gaussian steps only | the analytic Gaussian mechanism: z / sqrt(steps), halved under replace-one | exact |
| with Poisson subsampling | privacy loss distributions | an upper bound, tight to about 1 % |
| with sampling without replacement | Renyi, with every z halved: its bound assumes that the sum moves by C | an upper
  bound |
| integer noise in a sum ("summed"; discrete_gaussian.py) | Renyi, for a discrete Gaussian has a Gaussian's Renyi
  divergence, but not its loss distribution; at orders where Poisson subsampling has it too (see `_renyi`) | an upper
  bound |
| Poisson and one of the last two | no accountant covers both: epsilon of each group at delta / 2, added up | an upper
  bound, by basic composition; Gaussian steps count with the Poisson ones |
| sampling without replacement, under zero-out | none: all batches change with the number of rows | infinite |
| NonPrivate, or z = 0 | - | infinite |
| "summed" above an epsilon of about 80 | none: the sampler's table is not exact enough for more | infinite |

Integer noise is charged twice: as "summed", with the noise of all honest sites of a sum, and as "own share", with the
noise of the site alone. `compute_epsilon` counts the first, which holds if no more sites collude with the server than
the run config allows. `epsilon_against_all` is for the server and all other sites together.

dp-accounting loads scipy's statistics (1.5 s of CPU time, 70 MB). It is imported only where an epsilon is computed,
because every server and worker imports this module, even in a run without a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedveil.contract.privacy import (
    OWN_SHARE,
    SUMMED,
    Adjacency,
    Sampling,
    SamplingPlan,
    Spent,
    Step,
    check_delta,
    check_epsilon,
    check_sampling,
    stated_guarantee,
)
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    import dp_accounting

__all__ = [
    "accountant_relation",
    "compute_epsilon",
    "dp_event",
    "epsilon_against_all",
    "epsilon_in_sum",
    "max_charged",
    "mean_loss",
    "noise_multiplier_for",
    "round_epsilon",
]

_LARGEST_MULTIPLIER = 1e6
_TOLERANCE = 1e-3  # relative, of a calibrated multiplier; always on the private side
_INTERVAL = 1e-4  # of privacy losses, at which an epsilon is charged
_COARSER = tuple(_INTERVAL * 4**power for power in (5, 4, 3, 2, 1))
_LEFT = 0.1  # lower bound on the error left, relative to the last refinement's gain: fourfold intervals leave 1/15 once
# their error is quadratic
_HALF_ORDERS = [order / 2 for order in (*range(3, 128), 128, 160, 192, 256, 384, 512, 1024)]
_TABLE_DISTANCE = (
    2.0**-163
)  # of a round's noise: discrete_gaussian.total_variation_bound of 2^30 draws at each of 2^13 sites
_TABLE_SHARE = 2.0**-20  # of delta that it may take


def max_charged(multiplier: float, sampling: Sampling, plan: SamplingPlan, across_rounds: bool) -> Spent:
    """Return the charge over the plan for the site's most often sampled record.

    A record is in at most one of the disjoint batches of an epoch. Every participation begins an epoch; with
    `across_rounds`, consecutive rounds instead take consecutive steps of one epoch.
    """
    check_sampling(sampling, plan.neighbours)
    if sampling == "disjoint":
        an_epoch = plan.examples // plan.batch
        steps, begun = (plan.rounds * plan.steps, 1) if across_rounds else (plan.steps, plan.rounds)
        uses = begun * math.ceil(steps / an_epoch)
        return {Step("gaussian", 0, 0, multiplier): uses}
    if plan.batch == plan.examples:
        return {Step("gaussian", 0, 0, multiplier): plan.rounds * plan.steps}
    return {Step(sampling, plan.examples, plan.batch, multiplier): plan.rounds * plan.steps}


def accountant_relation(neighbours: Adjacency) -> dp_accounting.NeighboringRelation:
    """Return dp-accounting's name for the relation."""
    from dp_accounting import NeighboringRelation

    if neighbours is Adjacency.REPLACE_ONE:
        return NeighboringRelation.REPLACE_ONE
    return NeighboringRelation.ADD_OR_REMOVE_ONE


def dp_event(charges: Spent) -> Any:
    """Return the charges as one dp-accounting event."""
    import dp_accounting

    parts = [dp_accounting.SelfComposedDpEvent(_one(*step[:4]), count) for step, count in charges.items() if count]
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def _one(kind: str, examples: int, batch: int, multiplier: float) -> Any:
    import dp_accounting

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


def compute_epsilon(charges: Spent, delta: float, neighbours: Adjacency) -> float:
    """Return the smallest epsilon known for these charges; infinite if none is known."""
    check_delta(delta)
    return _epsilon(_sorted(charges), delta, neighbours, _INTERVAL)


def _sorted(charges: Spent) -> tuple[tuple[Step, int], ...]:
    return tuple(sorted((step, count) for step, count in charges.items() if count))


def round_epsilon(charges: Spent, delta: float, neighbours: Adjacency) -> float:
    """Return a valid epsilon that `stated_guarantee` prints like that of `compute_epsilon`; often much faster."""
    check_delta(delta)
    for low, high in _narrowing(charges, delta, neighbours):
        if stated_guarantee(low, delta, neighbours) == stated_guarantee(high, delta, neighbours):
            break
    return high


def _narrowing(charges: Spent, delta: float, neighbours: Adjacency) -> Iterator[tuple[float, float]]:
    """Yield bounds on `compute_epsilon`, each closer and more expensive; the last pair equals it.

    The upper bounds are valid: losses on a coarser grid dominate those on a finer grid that contains it. The lower ones
    assume that refinements do not remove a growing share of the remaining error: it decreases with the root of the
    interval, then with the interval, then with its square. Tests compare both with the finest grid.
    """
    steps, upper_bounds = _sorted(charges), list[float]()
    for interval in _COARSER if any(step[0] == "poisson" for step, _ in steps) else ():
        upper_bounds.append(_epsilon(steps, delta, neighbours, interval))
        yield _at_least(upper_bounds[-3:]), upper_bounds[-1]
    exact = _epsilon(steps, delta, neighbours, _INTERVAL)
    yield exact, exact


def _at_least(found: list[float]) -> float:
    """Estimate a lower bound on the last of three epsilons under further refinement, by their ratio; 0 if unknown."""
    if len(found) < 3 or not all(map(math.isfinite, found)):
        return 0.0
    before, last = found[0] - found[1], found[1] - found[2]
    if not 0 <= last < before:
        return 0.0
    return max(found[2] - max(_LEFT, 1.5 * last / (before - last)) * last, 0.0)


def mean_loss(charges: Spent) -> float:
    """Bound the mean privacy loss (Kullback-Leibler) of the Gaussian and Poisson-subsampled steps.

    The time and memory of a privacy loss distribution grow with it. For one step at rate q, under either
    relation, it is at most 2 q / z^2 (convexity) and 2 q^2 / (1 - q) (e^(1/z^2) - e^(-1/z^2)) (chi-square distance).
    """
    total = 0.0
    for (kind, examples, batch, multiplier, _), count in charges.items():
        if kind == OWN_SHARE:
            continue
        if multiplier == 0:
            return math.inf
        inverse, rate = multiplier**-2, batch / examples if examples and kind in ("poisson", SUMMED) else 1.0
        one = 2 * rate * inverse
        if rate < 1 and inverse < 1:  # above it, the other bound is the smaller one or the step is hardly private
            one = min(one, 4 * rate**2 / (1 - rate) * math.sinh(inverse))
        total += count * one
    return total


def epsilon_in_sum(charges: Spent, own: Spent) -> Spent:
    """Return charges of both kinds for the same uses: with the noise of a sum, and with a site's own share of it."""
    kinds = ((SUMMED, charges), (OWN_SHARE, own))
    return {step._replace(kind=kind): count for kind, spent_ in kinds for step, count in spent_.items()}


def epsilon_against_all(charges: Spent) -> Spent:
    """Return the charges with only the site's own share of the noise in sums."""
    return {
        step._replace(kind=SUMMED) if step.kind == OWN_SHARE else step: count
        for step, count in charges.items()
        if step.kind != SUMMED
    }


@lru_cache(maxsize=4096)
def _epsilon(charges: tuple[tuple[Step, int], ...], delta: float, neighbours: Adjacency, interval: float) -> float:
    charges = tuple((step, count) for step, count in charges if step[0] != OWN_SHARE)
    kinds = {step[0] for step, _ in charges}
    if any(step[3] == 0 for step, _ in charges):
        return math.inf
    if not charges:
        return 0.0

    from dp_accounting import gaussian_mechanism
    from dp_accounting.pld import PLDAccountant

    if kinds == {"gaussian"}:
        moved = 2 if neighbours is Adjacency.REPLACE_ONE else 1
        together = sum(count / step[3] ** 2 for step, count in charges) ** -0.5
        return float(gaussian_mechanism.get_epsilon_gaussian(together / moved, delta))
    if not kinds & {"fixed", SUMMED}:
        return _composed(PLDAccountant(accountant_relation(neighbours), interval), charges, delta)
    if "fixed" in kinds and neighbours is Adjacency.ZERO_OUT:
        return math.inf
    if "poisson" in kinds:
        groups = [tuple(c for c in charges if (c[0][0] in ("fixed", SUMMED)) is renyi) for renyi in (True, False)]
        return sum(_epsilon(group, delta / 2, neighbours, interval) for group in groups)
    return _renyi(charges, delta, neighbours)


def _renyi(charges: tuple[tuple[Step, int], ...], delta: float, neighbours: Adjacency) -> float:
    """Compute epsilon of Gaussian, fixed and summed steps.

    For integers x and a shift by a vector D of integers, E (q(x) / p(x))^k = exp((k^2 - k) |D|^2 / (2 sigma^2)) for
    every whole k, as for a Gaussian. So the divergence of a Poisson-subsampled step, whose power at a whole order
    expands into these, is the Gaussian's there; without subsampling it is so at every order.

    Under replace-one, a subsampled step is bounded via the data set without the record (Mironov 2017, Proposition 11):
    D_a(P, Q) <= (a - 1/2) / (a - 1) D_2a(P, R) + D_2a-1(R, Q).
    """
    from dp_accounting.rdp import RdpAccountant, compute_epsilon

    replaced = neighbours is Adjacency.REPLACE_ONE
    drawn = [(step, count) for step, count in charges if step[0] == SUMMED and step[1]]
    whole = [(step, count) for step, count in charges if (step, count) not in drawn]
    orders = [order for order in _HALF_ORDERS if replaced or order == int(order)] if drawn else None
    rest = RdpAccountant(orders, accountant_relation(neighbours))
    for (kind, examples, batch, z, _), count in whole:
        shifted = ("gaussian" if kind == SUMMED else kind, examples, batch, z / 2 if replaced else z)
        rest.compose(_one(*shifted), count)
    used = rest.orders
    total = rest.rdp
    if drawn and replaced:
        total = total + (used - 0.5) / (used - 1) * _drawn(drawn, 2 * used) + _drawn(drawn, 2 * used - 1)
    elif drawn:
        total = total + _drawn(drawn, used)
    summed = sum(count for step, count in charges if step[0] == SUMMED)
    epsilon = float(compute_epsilon(used, total, delta * (1 - _TABLE_SHARE if summed else 1))[0])
    # Draws within a distance d of exact ones add (1 + e^epsilon) d to delta.
    taken = math.log(summed * _TABLE_DISTANCE) + epsilon + 1 if summed else -math.inf
    return epsilon if taken <= math.log(delta * _TABLE_SHARE) else math.inf


def _drawn(charges: Iterable[tuple[Step, int]], orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return divergences of Poisson-subsampled steps when a record is added or removed."""
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders.tolist(), accountant_relation(Adjacency.ZERO_OUT))
    for (_, examples, batch, z, _), count in charges:
        accountant.compose(_one("poisson", examples, batch, z), count)
    return np.asarray(accountant.rdp)


def _composed(accountant: dp_accounting.PrivacyAccountant, charges: Iterable[tuple[Step, int]], delta: float) -> float:
    accountant.compose(dp_event(dict(charges)))
    return float(accountant.get_epsilon(delta))


def noise_multiplier_for(
    charges: Callable[[float], Spent], wished: float, delta: float, neighbours: Adjacency
) -> float:
    """Return the smallest z, to 0.1 %, whose epsilon is at most `wished`. Raises ConfigError if none up to 1e6 fits."""
    check_epsilon(wished)
    check_delta(delta)

    def fits(z: float) -> bool:
        for low, high in _narrowing(charges(z), delta, neighbours):
            if high <= wished or low > wished:
                break
        return high <= wished

    high = 1.0
    while not fits(high):
        high *= 2
        if high > _LARGEST_MULTIPLIER:
            raise ConfigError(
                f"epsilon: expected a value that noise of at most {high:g} C can reach, found {wished}; raise it"
            )
    low = high / 2
    while low > 1e-6 and fits(low):
        low, high = low / 2, low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
