"""A run's charges as mu of Gaussian differential privacy (Dong, Roth, Su 2022): one number for the whole trade-off.

A mechanism is mu-GDP if distinguishing two neighbors by its output is no easier than distinguishing N(0, 1) from N(mu,
1). For every epsilon, its delta is at most Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu).

| charges | mu |
|---|---|
| Gaussian steps only | sqrt(steps) / z, twice that under replace-one: exact |
| with Poisson subsampling | the smallest mu, to 0.1 %, with deltas at least as large as the accountant's, for every
  epsilon whose delta is at least a hundredth of the guarantee's; below that, no mu is a bound |
| other charges, no charges, or no noise | no mu is stated |

The mu of subsampled steps only describes a run: far out, their losses have heavier tails than any Gaussian smaller
than the unsampled one. Do not compose this mu, and do not use it to stop a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.contract.privacy import LEAST_DELTA, Adjacency, Spent
from fedveil.privacy import accounting

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

_POINTS = 1000  # number of epsilons; between two of them, the delta at the lower epsilon is used
_LARGEST = 100.0
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class GdpMu:
    """mu of GDP.

    Attributes:
        value: mu.
        down_to: the bound holds for every epsilon whose delta is at least this; 0 if mu is exact.
    """

    value: float
    down_to: float


def compute_mu(charges: Spent, delta: float, neighbours: Adjacency) -> GdpMu | None:
    """Return the smallest known mu for these charges, or None if no mu is known."""
    taken = {step: count for step, count in charges.items() if count}
    kinds = {step[0] for step in taken}
    if not taken or any(step[3] == 0 for step in taken) or not kinds <= {"gaussian", "poisson"}:
        return None
    if kinds == {"gaussian"}:
        moved = 2 if neighbours is Adjacency.REPLACE_ONE else 1
        return GdpMu(moved * math.sqrt(sum(count / step[3] ** 2 for step, count in taken.items())), 0.0)

    floor = max(delta / 100, LEAST_DELTA)
    return _dominating(accounting.loss_distributions(taken, floor, neighbours), floor)


def _dominating(losses: Sequence[PLDPmf], floor: float) -> GdpMu | None:
    """Return the smallest mu with deltas at least as large as the losses', for epsilons from 0 to that of `floor`."""
    from scipy.stats import norm  # slow to import: see accounting.py

    top = max(float(pmf.get_epsilon_for_delta(floor)) for pmf in losses)
    if not 0 < top < math.inf:
        return None
    grid = np.linspace(0.0, top, _POINTS)
    least = np.max([pmf.get_delta_for_epsilon(grid[:-1]) for pmf in losses], axis=0)

    def bounds(value: float) -> bool:
        of_gaussian = norm.cdf(value / 2 - grid[1:] / value) - np.exp(
            grid[1:] + norm.logcdf(-value / 2 - grid[1:] / value)
        )
        return bool(np.all(of_gaussian >= least))

    low, high = 0.0, 1e-3
    while not bounds(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return None
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if bounds(middle) else (middle, high)
    return GdpMu(high, floor)
