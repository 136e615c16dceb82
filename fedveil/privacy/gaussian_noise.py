"""Gaussian noise from random bytes: from the operating system for privacy, or from a stream for a repeatable run.

Formal guarantees: with `os.urandom` the draws are normal up to fp64 rounding and cannot be replayed.
Each draw is half the sum of four normal draws, so that the low bits of an output do not reveal the draws behind it
(Holohan, Braghin 2021). Sums are rounded to fp32 after the noise is added; the accounting does not cover attacks on the
rounding itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Source = Callable[[int], bytes]  # n -> n random bytes
_SUMMANDS = 4


def draw_gaussian(shape: tuple[int, ...], std: float, source: Source) -> Tensor:
    """Draw fp64 values from N(0, std^2) on the CPU; zeros for std = 0. Raises ValueError for an invalid std."""
    if not 0 <= std < math.inf:
        raise ValueError(f"std: expected a finite number of at least 0, found {std}")
    if std == 0:
        return torch.zeros(shape, dtype=torch.float64)
    count = math.prod(shape)
    drawn = _normal(_SUMMANDS * count, source).reshape(_SUMMANDS, count).sum(0) / math.sqrt(_SUMMANDS)
    return torch.from_numpy(drawn * std).reshape(shape)


def add_noise(value: Tensor, std: float, source: Source) -> Tensor:
    """Return the value plus noise, added in fp64, with the value's dtype and device."""
    return (value.detach().cpu().double() + draw_gaussian(tuple(value.shape), std, source)).to(
        value.device, value.dtype
    )


def _normal(count: int, source: Source) -> NDArray[np.float64]:
    """Draw normal values with the Box-Muller transform: two 53-bit uniform numbers give two normal numbers."""
    pairs = (count + 1) // 2
    words = np.frombuffer(source(16 * pairs), dtype="<u8") >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((words[:pairs] + 1.0) * 2.0**-53))  # in (0, 1]: no logarithm of 0
    angle = words[pairs:] * (2 * math.pi * 2.0**-53)
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]
