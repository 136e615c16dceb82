"""The epsilon of a unit whose k rows are drawn independently: the tightest published charge for steps on rows.

If rows are drawn at the rate q, a binomial number of the unit's k rows is in a step, and each of them moves the sum by
at most 1, in units of the clip bound. Under replace-one-unit a step has the pair

    P = sum_i Binom(i; k, q) N(-i, z^2),     Q = sum_i Binom(i; k, q) N(i, z^2)

(Charles et al. 2024, Fine-Tuning Large Language Models with User-Level Differential Privacy, for one order; Schuchardt
et al. 2024, Unified Mechanism-Specific Amplification by Subsampling and Group Privacy Amplification). The pair is its
own reverse, and q must not depend on the data. It charges less than group privacy does from the epsilon of a row.

Losses are rounded up to a grid, and steps compose by FFT. Losses that are too large for the grid count as failures. So
the figure is an upper bound, apart from fp64 rounding.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import binom, norm

__all__ = ["compute_unit_epsilon", "noise_for_unit"]

_GRID, _SPAN = 2e-4, 2**20  # grid of losses, from -105 to 105
_POINTS, _DEVIATIONS = 200_001, 12.0  # grid of a step's outcomes, and how far it extends beyond the means
_SHARE = 1e-3  # maximum fraction of delta for a step's largest losses, and for sums beyond the grid


def compute_unit_epsilon(rate: float, rows: int, z: float, steps: int, delta: float) -> float:
    """Return the epsilon of a unit with `rows` rows after `steps` steps; infinite if it is too large for the grid."""
    outcomes = np.linspace(-rows - _DEVIATIONS * z, rows + _DEVIATIONS * z, _POINTS)
    drawn = np.arange(rows + 1)[:, None]
    weights = binom.logpmf(drawn, rows, rate)
    log_p, log_q = (logsumexp(weights + norm.logpdf(outcomes, sign * drawn, z), axis=0) for sign in (-1, 1))
    places, masses = np.ceil((log_p - log_q) / _GRID).astype(int), np.exp(log_p) / np.exp(log_p).sum()
    share = delta * _SHARE
    # Losses fall as outcomes grow, so the first ones are the largest and rarest.
    is_kept = steps * np.cumsum(masses) > share
    places, masses, lost = places[is_kept], masses[is_kept], steps * float(masses[~is_kept].sum())
    wrapped = _chance_beyond_the_grid(places * _GRID, masses, steps)
    if wrapped > share:
        return math.inf
    return _epsilon_of(places, masses, steps, delta - lost - wrapped)


def noise_for_unit(rate: float, rows: int, steps: int, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier whose epsilon is at most `epsilon`, to within 0.1 % on the private side."""
    low, high = 0.05, 100.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        is_private = compute_unit_epsilon(rate, rows, middle, steps, delta) <= epsilon
        low, high = (low, middle) if is_private else (middle, high)
    return high


def _chance_beyond_the_grid(losses: NDArray[np.float64], masses: NDArray[np.float64], steps: int) -> float:
    """Bound the chance that the losses of all steps add up to more than the grid's end (Chernoff)."""
    end = _SPAN // 2 * _GRID
    return min(math.exp(min(0.0, steps * logsumexp(o * losses, b=masses) - o * end)) for o in (0.25, 0.5, 1, 2, 4))


def _epsilon_of(places: NDArray[np.int64], masses: NDArray[np.float64], steps: int, delta: float) -> float:
    of_step = np.zeros(_SPAN)
    np.add.at(of_step, places % _SPAN, masses)
    composed = np.roll(np.fft.irfft(np.fft.rfft(of_step) ** steps, _SPAN), _SPAN // 2)
    losses = (np.arange(_SPAN) - _SPAN // 2) * _GRID
    low, high = 0.0, float(losses[-1])
    while high - low > _GRID:
        middle = (low + high) / 2
        above = losses > middle
        is_above = float((composed[above] * -np.expm1(middle - losses[above])).sum()) > delta
        low, high = (middle, high) if is_above else (low, middle)
    return high
