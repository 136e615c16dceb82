"""Compute epsilon from charges, and noise for a target epsilon. No other module computes bounds.

Noise multipliers are z = (standard deviation of the noise on a sum) / (bound C on one record's part in it). Replacing
a record moves the sum by up to 2 C; zeroing a record out moves it by up to C.

| step | how it is counted | how exact |
|---|---|---|
| Gaussian steps only | the analytic Gaussian mechanism: z / sqrt(steps), halved under replace-one | exact |
| with Poisson subsampling, or with fixed-size batches under replace-one | the dominating pair of each step
  (dominating_pairs.py), all composed together with the Gaussian steps | exact for Poisson, an upper bound for fixed
  sizes; the grid adds less than 0.01 % |
| integer noise in a sum ("summed") | as the Gaussian or Poisson step that is rounded to it, at delta (1 - 2^-10), if
  (1 + e^epsilon) times the distance from that (`Step.variation`) is at most 2^-10 delta | as above, plus 0.1 % |
| "summed" where the distance is too large or unknown, and sums of ledgers before version 4 | Renyi, for a discrete
  Gaussian has a Gaussian's Renyi divergence, but not its loss distribution; at orders where Poisson subsampling has it
  too (see `_renyi`) | an upper bound |
| both of these together with sampled steps | the sum of each group's epsilon at delta / 2 | an upper bound, by
  composition |
| sampling without replacement, under zero-out | no bound: removing a row changes all batches | infinite |
| no noise: z = 0 | - | infinite |
| "summed" above an epsilon of about 80 | no bound: the sampler's table is not exact enough | infinite |

The z of integer noise is in units of D1, the largest distance between the integers with a record and without it.
Replacing a record moves them by at most 2 D1. In ledgers before version 4, z may be in units of half the distance
between two records, which is at least D1 / 1.5: for these, z / 1.5 replaces z in units of D1.

Integer noise is charged twice: as "summed", with the noise of all honest sites in a sum, and as "own share", with the
noise of the site alone. `compute_epsilon` counts the first, which holds if no more sites collude with the server
than the run config allows. `epsilon_against_all` is for the server and all other sites together.

dp-accounting loads scipy's statistics (1.5 s of CPU time, 70 MB). It is imported only when an epsilon is computed,
because every server and worker imports this module, even in a run without a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OLD_SUMMED,
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
    from dp_accounting.pld.pld_pmf import PLDPmf

    from fedveil.privacy.dominating_pairs import DominatingPair

__all__ = [
    "VARIATION_SHARE",
    "compute_epsilon",
    "epsilon_against_all",
    "epsilon_in_sum",
    "loss_distributions",
    "max_charged",
    "mean_loss",
    "name_sum_accountant",
    "noise_multiplier_for",
    "round_epsilon",
]

Charges = tuple[tuple[Step, int], ...]

_LARGEST_MULTIPLIER = 1e6
_TOLERANCE = 1e-3  # relative tolerance of a calibrated multiplier; always on the private side
_INTERVAL = 4e-4  # maximum interval of privacy losses at which an epsilon is charged
_COARSER = (256, 64, 16, 4)  # multiples of the finest interval, tried first
_GRID_SHARE = 2.0**-20  # fraction of delta for the truncated ends of all steps' grids
_LEFT = 0.1  # lower bound on the error left, relative to the last refinement's gain: fourfold intervals leave 1/15 once
# their error is quadratic
_HALF_ORDERS = [order / 2 for order in (*range(3, 128), 128, 160, 192, 256, 384, 512, 1024)]
_TABLE_DISTANCE = (
    2.0**-163
)  # for a round's noise: discrete_gaussian.total_variation_bound of 2^30 draws at each of 2^13 sites
_TABLE_SHARE = 2.0**-20  # fraction of delta that this distance may take
VARIATION_SHARE = 2.0**-10  # fraction of delta that the distance of sums from the continuous mechanism may take
_OLD_UNIT = 1.5  # maximum of D1 in units of an old sum, in which rounding at most doubled the noise


def max_charged(multiplier: float, sampling: Sampling, plan: SamplingPlan, across_rounds: bool) -> Spent:
    """Return the charge under the plan for the site's most frequently sampled record.

    A record is in at most one of an epoch's disjoint batches. Every participation begins an epoch; with
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


def compute_epsilon(charges: Spent, delta: float, neighbours: Adjacency) -> float:
    """Return the smallest epsilon known for these charges; infinite if none is known."""
    check_delta(delta)
    return _epsilon(_sorted(charges), delta, neighbours, 1)


def _sorted(charges: Spent) -> Charges:
    return tuple(sorted((step, count) for step, count in charges.items() if count))


def round_epsilon(charges: Spent, delta: float, neighbours: Adjacency) -> float:
    """Return an upper bound that `stated_guarantee` prints the same as `compute_epsilon`; often much faster."""
    check_delta(delta)
    for low, high in _narrowing(charges, delta, neighbours):
        if stated_guarantee(low, delta, neighbours) == stated_guarantee(high, delta, neighbours):
            break
    return high


def _narrowing(charges: Spent, delta: float, neighbours: Adjacency) -> Iterator[tuple[float, float]]:
    """Yield (lower, upper) bounds on `compute_epsilon`, each pair tighter and costlier; the last pair equals it.

    The upper bounds are valid: losses on a coarser grid dominate those on a finer grid that contains it. The lower
    bounds assume that refinements do not remove a growing share of the remaining error, which decreases with the root
    of the interval, then with the interval, then with its square. Tests compare both with the finest grid.
    """
    steps, upper_bounds = _sorted(charges), list[float]()
    for multiple in _COARSER if any(0 < step.batch < step.examples for step, _ in steps) else ():
        upper_bounds.append(_epsilon(steps, delta, neighbours, multiple))
        yield _at_least(upper_bounds[-3:]), upper_bounds[-1]
    exact = _epsilon(steps, delta, neighbours, 1)
    yield exact, exact


def _at_least(found: list[float]) -> float:
    """Estimate, from three epsilons, a lower bound on the last one under further refinement; 0 if unknown."""
    if len(found) < 3 or not all(map(math.isfinite, found)):
        return 0.0
    before, last = found[0] - found[1], found[1] - found[2]
    if not 0 <= last < before:
        return 0.0
    return max(found[2] - max(_LEFT, 1.5 * last / (before - last)) * last, 0.0)


def mean_loss(charges: Spent) -> float:
    """Bound the mean privacy loss (Kullback-Leibler divergence) of the steps.

    The time and memory for a privacy loss distribution grow with it. For one step at rate q, under either
    adjacency, it is at most 2 q / z^2 (convexity); with Poisson sampling it is also at most
    2 q^2 / (1 - q) (e^(1/z^2) - e^(-1/z^2)) (chi-square distance).
    """
    total = 0.0
    for (kind, examples, batch, multiplier, _), count in charges.items():
        if kind in (OWN_SHARE, OLD_OWN_SHARE):
            continue
        if multiplier == 0:
            return math.inf
        inverse, rate = (
            (multiplier / (_OLD_UNIT if kind == OLD_SUMMED else 1)) ** -2,
            batch / examples if examples else 1.0,
        )
        one = 2 * rate * inverse
        if kind != "fixed" and rate < 1 and inverse < 1:  # above 1, the other bound is smaller
            one = min(one, 4 * rate**2 / (1 - rate) * math.sinh(inverse))
        total += count * one
    return total


def epsilon_in_sum(charges: Spent, own: Spent, variations: tuple[float, float] = (0.0, 0.0)) -> Spent:
    """Return two charges for the same uses: one with all of a sum's noise, one with only a site's own share of it."""
    kinds = zip((SUMMED, OWN_SHARE), (charges, own), variations, strict=True)
    return {
        step._replace(kind=kind, variation=variation): count
        for kind, spent, variation in kinds
        for step, count in spent.items()
    }


def epsilon_against_all(charges: Spent) -> Spent:
    """Return the charges with only the site's own share of the noise in sums."""
    own = {OWN_SHARE: SUMMED, OLD_OWN_SHARE: OLD_SUMMED}
    return {
        step._replace(kind=own.get(step.kind, step.kind)): count
        for step, count in charges.items()
        if step.kind not in (SUMMED, OLD_SUMMED)
    }


def name_sum_accountant(charges: Spent, delta: float, neighbours: Adjacency) -> str:
    """Return the name of the accountant that `compute_epsilon` uses for noise in sums; "" without such noise."""
    counted = _counted(_sorted(charges))
    if not any(step.kind in (SUMMED, OLD_SUMMED) for step, _ in counted):
        return ""
    is_continuous = _epsilon_as_continuous(counted, delta, neighbours, 1) is not None
    return "privacy loss distributions" if is_continuous else "Renyi divergences"


@lru_cache(maxsize=4096)
def _epsilon(charges: Charges, delta: float, neighbours: Adjacency, multiple: int) -> float:
    """Compute epsilon on a grid whose interval is this multiple of the finest one."""
    charges = _counted(charges)
    if not charges:
        return 0.0
    if any(step.multiplier == 0 or (step.kind == "fixed" and neighbours is Adjacency.ZERO_OUT) for step, _ in charges):
        return math.inf
    if (epsilon := _epsilon_as_continuous(charges, delta, neighbours, multiple)) is not None:
        return epsilon
    kinds = {step.kind for step, _ in charges}
    if kinds <= {SUMMED, OLD_SUMMED, "gaussian"}:
        return _renyi(charges, delta, neighbours)
    apart = {OLD_SUMMED} if OLD_SUMMED in kinds else {SUMMED}
    old, others = (tuple(c for c in charges if (c[0].kind in apart) is is_apart) for is_apart in (True, False))
    return _renyi(old, delta / 2, neighbours) + _epsilon(others, delta / 2, neighbours, multiple)


def _counted(charges: Charges) -> Charges:
    return tuple((step, count) for step, count in charges if step.kind not in (OWN_SHARE, OLD_OWN_SHARE))


def _epsilon_as_continuous(charges: Charges, delta: float, neighbours: Adjacency, multiple: int) -> float | None:
    """Compute epsilon with the noise in sums as continuous noise; None if it is too far from continuous.

    delta(epsilon) of the sums is at most that of the continuous mechanism plus (1 + e^epsilon) times the distance.
    """
    if any(step.kind == OLD_SUMMED for step, _ in charges):
        return None
    if not any(step.kind == SUMMED for step, _ in charges):
        return _epsilon_of_pairs(charges, delta, neighbours, multiple)
    distance = sum(count * step.variation for step, count in charges if step.kind == SUMMED)
    spare = delta * VARIATION_SHARE
    if 2 * distance > spare:
        return None
    epsilon = _epsilon_of_pairs(charges, delta - spare, neighbours, multiple)
    return (
        epsilon
        if epsilon < math.inf and math.log1p(math.exp(min(epsilon, 700.0))) + _log(distance) <= math.log(spare)
        else None
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _epsilon_of_pairs(charges: Charges, delta: float, neighbours: Adjacency, multiple: int) -> float:
    if not any(0 < step.batch < step.examples for step, _ in charges):
        from dp_accounting import gaussian_mechanism

        return float(gaussian_mechanism.get_epsilon_gaussian(_together(charges) / _moved(neighbours), delta))
    pairs = _pairs(charges, neighbours)
    if _total_variation(pairs) <= delta:
        return 0.0
    return max(0.0, *(float(pmf.get_epsilon_for_delta(delta)) for pmf in _distributions(pairs, delta, multiple)))


def loss_distributions(charges: Spent, delta: float, neighbours: Adjacency) -> list[PLDPmf]:
    """Return the loss distributions of Gaussian and sampled steps together, one per order of the two data sets."""
    check_delta(delta)
    return _distributions(_pairs(_sorted(charges), neighbours), delta, 1)


def _distributions(pairs: list[tuple[DominatingPair, int]], delta: float, multiple: int) -> list[PLDPmf]:
    from fedveil.privacy import dominating_pairs

    tail = delta * _GRID_SHARE / sum(count for _, count in pairs)
    interval = dominating_pairs.finest_interval(pairs, _INTERVAL, tail)
    return dominating_pairs.compose(pairs, multiple * interval, tail)


def _pairs(charges: Iterable[tuple[Step, int]], neighbours: Adjacency) -> list[tuple[DominatingPair, int]]:
    """Return each kind of step's dominating pair with its count; Gaussian steps form one release."""
    from fedveil.privacy import dominating_pairs

    replaced = neighbours is Adjacency.REPLACE_ONE
    sampled = [(step, count) for step, count in charges if 0 < step.batch < step.examples]
    whole = [(step, count) for step, count in charges if not 0 < step.batch < step.examples]
    pairs = [(dominating_pairs.gaussian_pair(_together(whole), _moved(neighbours)), 1)] if whole else []
    for step, count in sampled:
        rate = step.batch / step.examples
        if step.kind == "fixed":
            pair = dominating_pairs.fixed_size_pair(rate, step.multiplier)
        elif replaced:
            pair = dominating_pairs.poisson_replace_pair(rate, step.multiplier)
        else:
            pair = dominating_pairs.poisson_zero_out_pair(rate, step.multiplier)
        pairs.append((pair, count))
    return pairs


def _total_variation(pairs: Iterable[tuple[DominatingPair, int]]) -> float:
    """Bound delta at epsilon 0: total variation distances add up."""
    return float(sum(count * pair.curve(np.zeros(1))[0] for pair, count in pairs))


def _together(charges: Iterable[tuple[Step, int]]) -> float:
    """Return the z of one Gaussian release with the same total cost."""
    return float(sum(count / step.multiplier**2 for step, count in charges) ** -0.5)


def _moved(neighbours: Adjacency) -> int:
    """Return how far one record can move a sum, in units of C."""
    return 2 if neighbours is Adjacency.REPLACE_ONE else 1


def _renyi(charges: Charges, delta: float, neighbours: Adjacency) -> float:
    """Compute the epsilon of Gaussian and summed steps.

    For integers x and a shift by a vector D of integers, E (q(x) / p(x))^k = exp((k^2 - k) |D|^2 / (2 sigma^2)) for
    every whole k, as for a Gaussian. The power of a Poisson-subsampled step at a whole order expands into these terms,
    so its divergence there equals the Gaussian's; without subsampling, this holds at every order.

    Under replace-one, a subsampled step is bounded through the data set without the record (Mironov 2017, Proposition
    11):
    D_a(P, Q) <= (a - 1/2) / (a - 1) D_2a(P, R) + D_2a-1(R, Q).
    """
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant, compute_epsilon

    replaced = neighbours is Adjacency.REPLACE_ONE
    charges = tuple((_in_today_s_unit(step, replaced), count) for step, count in charges)
    drawn = [(step, count) for step, count in charges if step.kind == SUMMED and step.examples]
    whole = [(step, count) for step, count in charges if (step, count) not in drawn]
    orders = [order for order in _HALF_ORDERS if replaced or order == int(order)] if drawn else None
    rest = RdpAccountant(orders)
    if whole:
        rest.compose(GaussianDpEvent(_together(whole) / _moved(neighbours)))
    used = rest.orders
    total = rest.rdp
    if drawn and replaced:
        total = total + (used - 0.5) / (used - 1) * _drawn(drawn, 2 * used) + _drawn(drawn, 2 * used - 1)
    elif drawn:
        total = total + _drawn(drawn, used)
    summed = sum(count for step, count in charges if step.kind == SUMMED)
    epsilon = float(compute_epsilon(used, total, delta * (1 - _TABLE_SHARE if summed else 1))[0])
    # Draws within a distance d of exact draws add (1 + e^epsilon) d to delta.
    taken = math.log(summed * _TABLE_DISTANCE) + epsilon + 1 if summed else -math.inf
    return epsilon if taken <= math.log(delta * _TABLE_SHARE) else math.inf


def _in_today_s_unit(step: Step, replaced: bool) -> Step:
    if step.kind != OLD_SUMMED:
        return step
    is_half_of_two = replaced and not step.examples  # the old unit itself: half the distance between two records
    return step._replace(kind=SUMMED, multiplier=step.multiplier / (1 if is_half_of_two else _OLD_UNIT))


def _drawn(charges: Iterable[tuple[Step, int]], orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the divergences of Poisson-subsampled steps when a record is zeroed out."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders.tolist())  # its adjacency, add-or-remove-one at a fixed rate, is zero-out
    for step, count in charges:
        sampled = PoissonSampledDpEvent(step.batch / step.examples, GaussianDpEvent(step.multiplier))
        accountant.compose(sampled, count)
    return np.asarray(accountant.rdp)


def noise_multiplier_for(
    charges: Callable[[float], Spent], wished: float, delta: float, neighbours: Adjacency
) -> float:
    """Return the smallest z, to within 0.1 %, with an epsilon of at most `wished`.

    Raises ConfigError if no z up to 1e6 suffices.
    """
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
            raise ConfigError(f"epsilon: even noise of {high:g} C does not reach {wished}; raise it")
    low = high / 2
    while low > 1e-6 and fits(low):
        low, high = low / 2, low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
