"""LiRA, the likelihood-ratio attack with shadow models: the yardstick for other membership attacks.

Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles. IEEE S&P 2022.

    phi = ln(p / (1 - p)),  p = exp(-loss): the mean probability of the row's own target      (section V-B)
    online:  ln N(phi; mu_in, s_in) - ln N(phi; mu_out, s_out)                                  (Algorithm 1)
    offline: ln Phi((phi - mu_out) / s_out), where no shadow had the row                        (Eq. 4)

The adversary draws rows like the target's and trains shadows on random halves of a pool that holds the target's
candidates. It compares the target's confidence in a row with that of the shadows that had the row, and of those that
had not.

| case | result |
|---|---|
| a row with fewer than 16 shadows a side | the variance pooled over all rows (Carlini et al., section VI-B) |
| a row that no shadow had (or every one) | offline against the side that is there; a row without both: ValueError |
| shadows that agree to the bit | a least standard deviation of 1e-3 |
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
    """Shadow models of a pool.

    Attributes:
        members: (shadows, pool) whether a shadow was trained on a row.
        weights: of each shadow.
    """

    members: NDArray[np.bool_]
    weights: Sequence[Weights]


def target_confidence(losses: Numbers) -> Numbers:
    """(rows,) phi of mean target losses in nats. It is finite for losses of 0."""
    return np.asarray(-losses - np.log(-np.expm1(-np.maximum(losses, 1e-12))))


def train_shadows(
    train: Callable[[list[int], int], Weights], pool: int, count: int, rng: np.random.Generator
) -> ShadowModelSet:
    """Trains shadows, each on half of the pool; each row is in exactly half of them.

    Args:
        train: gets the indices of a shadow's rows and the shadow's number, and returns its weights.
        pool: number of rows.
        count: number of shadows.

    Raises:
        ValueError: a count that is not even and at least 2, or a pool below 2 rows.
    """
    if count < 2 or count % 2 or pool < 2:
        raise ValueError(f"expected an even number of shadows, 2 or more, and 2 rows, found {count} and {pool}")
    members = np.zeros((count, pool), dtype=bool)
    for first in range(0, count, 2):  # a pair of shadows shares the pool out
        half = rng.permutation(pool)[: pool // 2]
        members[first, half] = True
        members[first + 1] = ~members[first]
    return ShadowModelSet(
        members, [train([int(i) for i in np.flatnonzero(row)], number) for number, row in enumerate(members)]
    )


def lira_scores(target: Numbers, shadows: Numbers, members: NDArray[np.bool_]) -> Numbers:
    """(rows,) log likelihood ratio of each row.

    Args:
        target: (rows,) phi under the attacked model.
        shadows: (shadows, rows) phi under each shadow.
        members: (shadows, rows) which shadow had which row.

    Raises:
        ValueError: a row that no shadow scored.
    """
    mean_in, std_in = _gaussian(shadows, members)
    mean_out, std_out = _gaussian(shadows, ~members)
    if np.isnan(mean_out).any() and np.isnan(mean_in[np.isnan(mean_out)]).any():
        raise ValueError("expected shadows that score every row, found a row without any")
    both = _log_normal(target, mean_in, std_in) - _log_normal(target, mean_out, std_out)
    only_out = log_cdf((target - mean_out) / std_out)
    only_in = log_cdf((target - mean_in) / std_in)
    return np.where(np.isnan(mean_in), only_out, np.where(np.isnan(mean_out), only_in, both))


def _gaussian(shadows: Numbers, chosen: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of the chosen shadows, by row; a pooled deviation where they are few."""
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
    """ln Phi(z), by the error function; far below by its asymptote, so that no score is minus infinity."""

    def of(v: float) -> float:
        if v > -30:
            return math.log(0.5 * math.erfc(-v / math.sqrt(2)))
        return -0.5 * v * v - math.log(-v * math.sqrt(2 * math.pi))

    return np.array([of(v) for v in np.nan_to_num(z)])
