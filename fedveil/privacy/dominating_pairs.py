"""Dominating pairs for one step, and their composition on a grid of privacy losses.

A pair (A, B) dominates a step if no two neighboring data sets have a larger hockey-stick divergence
H_a(P, Q) = sup_E P(E) - a Q(E), at any a >= 0. Pairs that dominate at every a compose (Zhu, Dong, Wang 2022). With the
noise's standard deviation z and a record's part of at most 1:

| step | pair | proof |
|---|---|---|
| Gaussian | N(m), N(0), with m = 1, or 2 under replace-one; its own reverse | Balle, Wang 2018 |
| Poisson, zero-out | (1 - q) N(0) + q N(1), N(0), and the reverse; each order is composed, and the larger epsilon
  counts | Zhu et al. 2022 |
| Poisson, replace-one | (1 - q) N(0) + q N(-1), (1 - q) N(0) + q N(1); its own reverse | Koskela et al. 2020 |
| fixed size, replace-one | the joint pair of A = (1 - q) N(0) + q N(2) and B = N(0) | Zhu et al. 2022, Prop. 30 |

The last step has the curve of (A, B) at a >= 1 and that of (B, A) at a < 1. Composing each pair separately and taking
the larger result is not an upper bound (Lebeda et al. 2025). A single joint pair has both curves: where A > B, an
outcome (x, +) has the masses (A, B) and an outcome (x, -) the masses (B, A); one more outcome has the remaining mass on
both sides. It exists because A and B together have a mass of at most 1 there, q + (2 - 2 q) Phi(-1 / z), and it is its
own reverse.

Losses are discretized by connecting the dots of a curve, which is an upper bound (Doroshenko et al. 2022). Every tail
probability is computed directly, never as 1 minus its complement, because the masses are second differences of the
curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld import pld_pmf
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

Curve = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # H_a at a = e^loss, for losses of at least 0

_MOST_POINTS = 1 << 19  # maximum number of points in half of one step's grid
_LARGEST_LOSS = 1e6


@dataclass(frozen=True)
class DominatingPair:
    """The two curves of a pair, for losses of at least 0.

    Attributes:
        curve: H_a(A, B).
        reverse: H_a(B, A).
        spread: a lower estimate of the standard deviation of the loss, which the grid has to resolve.
    """

    curve: Curve
    reverse: Curve
    spread: float

    @property
    def is_symmetric(self) -> bool:
        """Return whether the pair and its reverse have the same curve."""
        return self.curve is self.reverse


def gaussian_pair(multiplier: float, shift: float) -> DominatingPair:
    """Return the pair of a Gaussian release whose value moves by at most `shift`."""
    curve = _mixture_against_normal(1.0, multiplier / shift)
    return DominatingPair(curve, curve, shift / multiplier)


def poisson_zero_out_pair(rate: float, multiplier: float) -> DominatingPair:
    """Return the pair of a Poisson-subsampled Gaussian step under zero-out."""
    z = multiplier
    return DominatingPair(_mixture_against_normal(rate, z), _normal_against_mixture(rate, z), _spread(rate, z))


def poisson_replace_pair(rate: float, multiplier: float) -> DominatingPair:
    """Return the pair of a Poisson-subsampled Gaussian step under replace-one."""
    curve = _mixture_against_mirrored(rate, multiplier)
    return DominatingPair(curve, curve, _spread(rate, multiplier / 2))


def fixed_size_pair(rate: float, multiplier: float) -> DominatingPair:
    """Return the joint pair of a Gaussian step on a batch of fixed size, drawn without replacement; replace-one."""
    curve = _mixture_against_normal(rate, multiplier / 2)
    return DominatingPair(curve, curve, _spread(rate, multiplier / 2))


def _spread(rate: float, z: float) -> float:
    """Return the root of the chi-square distance, q sqrt(e^(1 / z^2) - 1), capped where losses are no longer small."""
    return rate * math.sqrt(math.expm1(min(z**-2, 4.0)))


def _mixture_against_normal(rate: float, z: float) -> Curve:
    """Return the curve of ((1 - q) N(0) + q N(1), N(0)): above z t, the mixture is more than a times as dense."""

    def curve(loss: NDArray[np.float64]) -> NDArray[np.float64]:
        small = np.log1p(np.expm1(np.minimum(loss, 1.0)) / rate)
        excess = np.where(loss < 1, small, loss + np.log1p((rate - 1) * np.exp(-loss)) - math.log(rate))
        t = 0.5 / z + z * excess  # where the component N(1) is e^excess times as dense as N(0)
        values: NDArray[np.float64] = rate * (ndtr(1 / z - t) - np.exp(excess + log_ndtr(-t)))
        return np.maximum(values, 0.0)

    return curve


def _normal_against_mixture(rate: float, z: float) -> Curve:
    """Return the curve of (N(0), (1 - q) N(0) + q N(1)): 0 from a = 1 / (1 - q)."""

    def curve(loss: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = np.expm1(-loss) / rate  # the component N(1) is at most 1 + scaled times as dense as N(0)
        inside = scaled > -1
        excess = np.log1p(np.where(inside, scaled, 0.0))
        t = 0.5 / z + z * excess
        values = rate * (np.exp(loss + excess + log_ndtr(t)) - np.exp(loss + log_ndtr(t - 1 / z)))
        return np.where(inside, np.maximum(values, 0.0), 0.0)

    return curve


def _mixture_against_mirrored(rate: float, z: float) -> Curve:
    """Return the curve of ((1 - q) N(0) + q N(-1), (1 - q) N(0) + q N(1)).

    Below z t, the first is more than a times as dense as the second. With u = e^(x / z^2) and
    k = q e^(-1 / (2 z^2)), the two are equal up to the factor a at the positive root of
    a k u^2 + (a - 1) (1 - q) u - k = 0.
    """
    log_k = math.log(rate) - 0.5 / z**2

    def curve(loss: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            log_common = loss + np.log(-np.expm1(-loss)) + math.log1p(-rate)  # (a - 1) (1 - q)
        root = np.logaddexp(2 * log_common, 2 * (math.log(2) + log_k) + loss) / 2
        t = z * (math.log(2) + log_k - np.logaddexp(log_common, root))
        lost = np.exp(log_common + log_ndtr(t)) + rate * np.exp(loss + log_ndtr(t - 1 / z))
        values: NDArray[np.float64] = rate * ndtr(t + 1 / z) - lost
        return np.maximum(values, 0.0)

    return curve


def finest_interval(pairs: Iterable[tuple[DominatingPair, int]], most: float, tail: float) -> float:
    """Return the grid interval for these pairs and counts: at most `most`, and finer if losses spread less.

    Connecting dots adds up to a quarter of the squared interval to a step's variance.
    """
    steps = sum(count for _, count in pairs)
    spread = math.sqrt(sum(count * pair.spread**2 for pair, count in pairs) / steps)
    largest = max(_largest_loss(curve, tail) for pair, _ in pairs for curve in {pair.curve, pair.reverse})
    return max(min(most, 0.02 * spread), largest / _MOST_POINTS)


def compose(pairs: Iterable[tuple[DominatingPair, int]], interval: float, tail: float) -> list[pld_pmf.PLDPmf]:
    """Return the loss distributions of the pairs, each composed as often as its count: one per order, at most two.

    Args:
        interval: the grid's interval.
        tail: the divergence at which one step's grid may end.
    """
    symmetric = all(pair.is_symmetric for pair, _ in pairs)
    orders = [[(pair.curve, pair.reverse, count) for pair, count in pairs]]
    if not symmetric:
        orders.append([(pair.reverse, pair.curve, count) for pair, count in pairs])
    return [_composed(order, interval, tail) for order in orders]


def _composed(order: list[tuple[Curve, Curve, int]], interval: float, tail: float) -> pld_pmf.PLDPmf:
    total = None
    for curve, reverse, count in order:
        step = _discretized(curve, reverse, interval, tail)
        repeated = step.self_compose(count) if count > 1 else step
        total = repeated if total is None else pld_pmf.compose_pmfs(total, repeated, 1e-15)
    assert total is not None
    return total


def _discretized(curve: Curve, reverse: Curve, interval: float, tail: float) -> pld_pmf.PLDPmf:
    """Connect the dots of a curve, from minus the reverse curve's largest loss to the curve's own largest loss.

    Below a = 1, H_a(A, B) = 1 - a + a H_1/a(B, A).
    """
    above, below = (math.ceil(_largest_loss(of, tail) / interval) + 1 for of in (curve, reverse))
    up, down = interval * np.arange(above + 1, dtype=np.float64), interval * np.arange(below, 0, -1, dtype=np.float64)
    divergences = np.concatenate([-np.expm1(-down) + np.exp(-down) * reverse(down), curve(up)])
    return pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, np.arange(-below, above + 1), np.clip(divergences, 0.0, 1.0)
    )


def _largest_loss(curve: Curve, tail: float) -> float:
    """Return a loss, at most 1 % or 1e-4 too large, at which the curve is at most `tail`."""
    low, high = 0.0, 1e-4
    while high < _LARGEST_LOSS and float(curve(np.array([high]))[0]) > tail:
        low, high = high, 2 * high
    while high - low > max(0.01 * high, 1e-4):
        middle = (low + high) / 2
        low, high = (middle, high) if float(curve(np.array([middle]))[0]) > tail else (low, middle)
    return high
