"""Compare the current accountant's epsilons with those that the previous accountant charged for the same steps.

| kind of case | before | now |
|---|---|---|
| noise at the site, Poisson | privacy losses of the relation's pair of distributions | the same |
| noise in the sum, Poisson | Renyi at integer orders; under replace-one via the data set without the row (Mironov
  2017, Proposition 11) | the dominating pair; z in units of D1, so 1.5% smaller at the usual fineness |
| batches of a fixed size | Renyi (Wang, Balle, Kasiviswanathan 2019), at z / 2 | the joint pair of both orders |
| a site's own share of noise in a sum of h sites | the epsilon of the sum's unsampled Gaussian, with its
  noise divided by sqrt(h) | the run's own steps at z / sqrt(h) |

"before / now" above 1 is an overcharge that has been removed; below 1, the previous accountant charged too little.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent, gaussian_mechanism
from dp_accounting.rdp import RdpAccountant, compute_epsilon

from fedveil.contract.privacy import SUMMED, Adjacency, Step
from fedveil.privacy import accounting
from fedveil_bench.common.data import DataRequirement
from fedveil_bench.runner import BenchOptions, BenchOutcome

_ORDERS = [order / 2 for order in (*range(3, 128), 128, 160, 192, 256, 384, 512, 1024)]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each case in `settings["cases"]` and each of its kinds."""
    rows = []
    for case in settings["cases"]:
        for kind in case["kinds"]:
            began = time.monotonic()
            before, now = compare(case, kind, settings)
            name = f"{kind}: n {case['n']:,}, b {case['b']}, z {case['z']:g}, T {case['steps']}"
            options.say(f"{name}: before {before:.4f}, now {now:.4f}")
            metrics = {"before": before, "now": now, "before / now": before / now}
            exact = {metric: {"mean": v, "low": v, "high": v, "n": 1} for metric, v in metrics.items()}
            rows.append({"name": name, "metrics": exact, "seconds": time.monotonic() - began})
    return BenchOutcome(rows)


def list_requirements(settings: Mapping[str, Any]) -> list[DataRequirement]:
    """Return no requirements, because this benchmark reads no data."""
    return []


def compare(case: Mapping[str, Any], kind: str, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return the epsilons of the previous and the current accountant for a case."""
    n, b, z, steps, delta = case["n"], case["b"], case["z"], case["steps"], case.get("delta", settings["delta"])
    rounding = settings["rounding"]
    relation = Adjacency.ZERO_OUT if "zero-out" in kind else Adjacency.REPLACE_ONE
    is_replaced = relation is Adjacency.REPLACE_ONE

    def now(step: Step) -> float:
        return accounting.compute_epsilon({step: steps}, delta, relation)

    if kind.startswith("own share"):
        claimed = now(Step("poisson", n, b, z))
        return own_share_before(claimed, case["sites"], delta), now(Step("poisson", n, b, z / math.sqrt(case["sites"])))
    if kind.startswith("sum"):
        unit = (1 + rounding / 2) / (1 + rounding) if is_replaced else 1.0  # D2 / 2 in units of D1
        before = replaced_in_sum_before if is_replaced else zeroed_in_sum_before
        return before(b / n, z, steps, delta), now(Step(SUMMED, n, b, z * unit))
    if kind.startswith("fixed"):
        return fixed_before(n, b, z, steps, delta), now(Step("fixed", n, b, z))
    found = now(Step("poisson", n, b, z))
    return found, found


def zeroed_in_sum_before(rate: float, z: float, steps: int, delta: float) -> float:
    """Return the epsilon of Poisson steps with noise in the sum under zero-out, by Renyi divergences."""
    whole = [order for order in _ORDERS if order == int(order)]
    return _epsilon_of(whole, _divergences(rate, z, steps, whole), delta)


def replaced_in_sum_before(rate: float, z: float, steps: int, delta: float) -> float:
    """Return that epsilon under replace-one: D_a(P, Q) <= (a - 1/2) / (a - 1) D_2a(P, R) + D_2a-1(R, Q)."""
    doubled = _divergences(rate, z, steps, [2 * order for order in _ORDERS])
    below = _divergences(rate, z, steps, [2 * order - 1 for order in _ORDERS])
    parts = zip(_ORDERS, doubled, below, strict=True)
    return _epsilon_of(_ORDERS, [(a - 0.5) / (a - 1) * first + second for a, first, second in parts], delta)


def fixed_before(n: int, b: int, z: float, steps: int, delta: float) -> float:
    """Return the epsilon of batches of a fixed size under replace-one, by Renyi divergences at z / 2."""
    from dp_accounting import NeighboringRelation

    accountant = RdpAccountant(None, NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(n, b, GaussianDpEvent(z / 2)), steps)
    return float(accountant.get_epsilon(delta))


def own_share_before(claimed: float, sites: int, delta: float) -> float:
    """Return the epsilon of the Gaussian that has the claim's epsilon, after dividing its noise by sqrt(sites)."""
    low, high = 1e-3, 1e3
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if gaussian_mechanism.get_epsilon_gaussian(middle, delta) > claimed:
            low = middle
        else:
            high = middle
    return float(gaussian_mechanism.get_epsilon_gaussian(high / math.sqrt(sites), delta))


def _divergences(rate: float, z: float, steps: int, orders: list[float]) -> list[float]:
    accountant = RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), steps)
    return [float(value) for value in accountant.rdp]


def _epsilon_of(orders: list[float], divergences: list[float], delta: float) -> float:
    return float(compute_epsilon(orders, divergences, delta)[0])
