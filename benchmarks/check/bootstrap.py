"""Repeat the bootstrap over test sources from the losses that a result file keeps."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPLICATES = 2000
NEAR = 0.2  # maximum difference between two bootstraps of the same rows, relative to the half-width
Numbers = NDArray[np.float64]


def read_losses(found: Mapping[str, Any]) -> tuple[Numbers, Numbers]:
    """Return the losses (seeds, sources), in nats, and the target tokens (sources,) of a row's metric."""
    tokens = _decode(found["tokens"])
    return np.array([_decode(text) for text in found["nats"]]), tokens


def compute_means(nats: Numbers, tokens: Numbers) -> list[float]:
    """Return the mean loss per token of each seed."""
    return [float(of_seed.sum() / tokens.sum()) for of_seed in nats]


def draw_replicates(nats: Numbers, tokens: Numbers) -> Numbers:
    """Return (REPLICATES,): the mean over seeds of the loss on each resample of the sources, the same for all rows."""
    sources = len(tokens)
    drawn = np.random.default_rng(0).multinomial(sources, np.full(sources, 1 / sources), size=REPLICATES)
    return np.asarray((drawn @ nats.T / (drawn @ tokens)[:, None]).mean(1))


def compute_halves(replicates: Numbers) -> tuple[float, float]:
    """Return the half-widths below and above the mean of the 95 % percentile interval."""
    low, high = np.quantile(replicates, (0.025, 0.975))
    middle = float(replicates.mean())
    return max(0.0, middle - float(low)), max(0.0, float(high) - middle)


def _decode(text: str) -> Numbers:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)
