"""LiRA, the likelihood-ratio attack with shadow models: the reference for other membership attacks.

Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles. IEEE S&P 2022.

    phi = ln(p / (1 - p)),  p = exp(-loss): the mean probability of the example's own target  (section V-B)
    online:  ln N(phi; mu_in, s_in) - ln N(phi; mu_out, s_out)                                  (Algorithm 1)
    offline: ln Phi((phi - mu_out) / s_out), if no shadow trained on the example                (Eq. 4)

The adversary draws examples like the target's and trains shadows on random halves of a pool that contains the target's
candidates. It compares the target's confidence on an example with the confidence of shadows trained with and without
that example.

| case | result |
|---|---|
| fewer than 16 shadows per side | one variance pooled over all examples (Carlini et al., section VI-B) |
| an example in no shadow, or in all shadows | the offline score relative to the side that exists; ValueError if neither
  exists |
| shadows with bit-identical values | a minimum standard deviation of 1e-3 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.contract.param_spec import Weights

__all__ = ["ShadowModelSet", "lira_scores", "log_cdf", "target_confidence", "train_shadows"]

Numbers = NDArray[np.float64]
POOLED_BELOW = 16
_LEAST_STD = 1e-3


@dataclass(frozen=True)
class ShadowModelSet:
    """Shadow models trained on a pool.

    Attributes:
        members: (shadows, pool), true if a shadow was trained on an example.
        weights: weights of each shadow.
    """

    members: NDArray[np.bool_]
    weights: Sequence[Weights]


def target_confidence(losses: Numbers) -> Numbers:
    """Return phi of mean target losses in nats, shape (rows,). It is finite for losses of 0."""
    return np.asarray(-losses - np.log(-np.expm1(-np.maximum(losses, 1e-12))))


def train_shadows(
    train: Callable[[list[int], int], Weights], pool: int, count: int, rng: np.random.Generator
) -> ShadowModelSet:
    """Train shadows, each on half of the pool; each example is in exactly half of the shadows.

    Args:
        train: takes the indices of a shadow's examples and the shadow's number, and returns the shadow's weights.
        pool: number of examples.
        count: number of shadows.

    Raises:
        ValueError: `count` is odd or below 2, or the pool has fewer than 2 examples.
    """
    if count < 2 or count % 2 or pool < 2:
        raise ValueError(
            f"the number of shadows must be even and at least 2, and the pool needs at least 2 examples; found {count} "
            f"and {pool}"
        )
    members = np.zeros((count, pool), dtype=bool)
    for first in range(0, count, 2):  # two shadows split the pool
        half = rng.permutation(pool)[: pool // 2]
        members[first, half] = True
        members[first + 1] = ~members[first]
    return ShadowModelSet(
        members, [train([int(i) for i in np.flatnonzero(row)], number) for number, row in enumerate(members)]
    )


def lira_scores(target: Numbers, shadows: Numbers, members: NDArray[np.bool_]) -> Numbers:
    """Return the log likelihood ratio of each example, shape (rows,).

    Args:
        target: (rows,) phi under the attacked model.
        shadows: (shadows, rows) phi under each shadow.
        members: (shadows, rows), true if the shadow was trained on the example.

    Raises:
        ValueError: an example that no shadow scored.
    """
    mean_in, std_in = _gaussian(shadows, members)
    mean_out, std_out = _gaussian(shadows, ~members)
    if np.isnan(mean_out).any() and np.isnan(mean_in[np.isnan(mean_out)]).any():
        raise ValueError("no shadow has scored one of the examples")
    both = _log_normal(target, mean_in, std_in) - _log_normal(target, mean_out, std_out)
    only_out = log_cdf((target - mean_out) / std_out)
    only_in = log_cdf((target - mean_in) / std_in)
    return np.where(np.isnan(mean_in), only_out, np.where(np.isnan(mean_out), only_in, both))


def _gaussian(shadows: Numbers, chosen: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Return the mean and standard deviation of the chosen shadows per example; pooled if there are few shadows."""
    values = np.where(chosen, shadows, np.nan)
    number = chosen.sum(0)
    mean = np.full(shadows.shape[1], np.nan)
    there = number > 0
    mean[there] = np.nanmean(values[:, there], axis=0)
    square = np.nansum((values - mean) ** 2, axis=0)
    degrees = np.maximum(number - 1, 0)
    pooled = math.sqrt(square.sum() / max(1, degrees.sum()))
    std = np.where(number >= POOLED_BELOW, np.sqrt(square / np.maximum(degrees, 1)), pooled)
    return mean, np.maximum(std, _LEAST_STD)


def _log_normal(x: Numbers, mean: Numbers, std: Numbers) -> Numbers:
    return np.asarray(-0.5 * ((x - mean) / std) ** 2 - np.log(std))


def log_cdf(z: Numbers) -> Numbers:
    """Return ln Phi(z), using the error function, or its asymptote for very low z so that no score is -infinity."""

    def of(v: float) -> float:
        if v > -30:
            return math.log(0.5 * math.erfc(-v / math.sqrt(2)))
        return -0.5 * v * v - math.log(-v * math.sqrt(2 * math.pi))

    return np.array([of(v) for v in np.nan_to_num(z)])
