"""Fixed-point values as integers modulo 2^w, so that a uniform mask hides them and sums of masked values are exact.

    integer = round(S w clip(x, -C, C)),    S = (2^(w-1) - 1 - K - 2^(w-51)) / (K M C)

C is the bound, K the maximum number of summands, M the largest weight. No sum of K integers wraps,
because each is at most S M C + 1/2 in absolute value. The last term covers rounding up in fp64; it is
0 for w = 32. Rounding moves a weighted mean by at most K / (2 S W), where W is the sum of the weights; for
equal weights, by K C 2^-w. If sites add noise, S is capped at the resolution that is useful under that noise
(`finest`).

| case | what happens |
|---|---|
| a value beyond the bound | clipped to the bound, and counted |
| NaN or an infinity | ValueError: no integer represents it |
| an entry excluded by the mask | 0, regardless of its value |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedveil.errors import WireError
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.plan import AttemptPlan

BLOCK = 1 << 16  # entries processed at a time, few enough to stay in the cache in fp64


@dataclass(frozen=True)
class FixedPointRing:
    """Integers modulo 2^bits, and the scale that fits them.

    Attributes:
        bits: w, 32 or 64.
        most_summands: K, the maximum number of summands.
        most_weight: M; weights are whole numbers from 1 to M.
        bound: C, the bound on an entry's absolute value.
        finest: the largest useful S.
        noise: the largest integer that a site's noise adds to an entry.
    """

    bits: int
    most_summands: int
    most_weight: int
    bound: float
    finest: float = math.inf
    noise: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ValueError(f"bits: expected 32 or 64, found {self.bits}")
        if not (self.most_summands >= 1 and self.most_weight >= 1 and 0 < self.bound < math.inf):
            raise ValueError(f"expected summands, weight and bound above 0, found {self}")
        if self.most_summands * self.most_weight >= 1 << (self.bits - 2):
            raise ValueError(
                f"expected at most {1 << (self.bits - 2)} for summands times weight in {self.bits} bits, found "
                f"{self.most_summands * self.most_weight}"
            )
        if self.noise and self.most_summands * (self.largest + self.noise) >= 1 << (self.bits - 1):
            raise ValueError(f"noise: {self.noise} is too much: a sum would wrap around")
        if not math.isfinite(self.scale * self.most_weight):
            raise ValueError(f"bound: {self.bound} has no finite scale; raise secure.clip-bound")

    @classmethod
    def from_plan(cls, plan: AttemptPlan) -> FixedPointRing:
        """Create the ring for a plan's vectors. Raises WireError if a sum over that many sites does not fit."""
        try:
            return cls(plan.bits, len(plan.members), plan.most_weight, plan.bound)
        except ValueError as error:
            raise WireError(f"secure: {error}") from None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the integers, little-endian."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def scale(self) -> float:
        """Return S, the number of integer steps per unit of weight times value."""
        room = (1 << (self.bits - 1)) - 1 - self.most_summands - ((1 << self.bits) >> 51)
        return min(room // (self.most_summands * self.most_weight) / self.bound, self.finest)

    @property
    def largest(self) -> int:
        """Return the largest integer of a value."""
        return math.ceil(self.scale * self.most_weight * self.bound) + 1

    @property
    def step(self) -> float:
        """Return how far rounding can move a mean over sites with the largest weight; for w = 64, fp64 adds 2^-51 C."""
        return 1 / (2 * self.scale * self.most_weight)

    def encode(self, value: Float[Tensor, "*s"], weight: int, mask: Bool[Tensor, "*s"] | None, into: Integers) -> int:
        """Write a tensor's integers into a vector, row by row, and return how many entries were clipped.

        Raises:
            ValueError: a value is not finite, or the weight is out of range.
        """
        if not 1 <= weight <= self.most_weight:
            raise ValueError(f"weight: expected a whole number from 1 to {self.most_weight}, found {weight}")
        flat, flat_mask = value.detach().cpu().flatten(), None if mask is None else mask.cpu().flatten()
        signed, clipped = into.view(f"<i{self.bits // 8}"), 0  # two's complement
        for start in range(0, len(flat), BLOCK):
            block = flat[start : start + BLOCK]
            if flat_mask is not None:
                block = torch.where(flat_mask[start : start + BLOCK], block, 0.0)
            low, high = map(float, torch.aminmax(block))
            if not (math.isfinite(low) and math.isfinite(high)):  # with a NaN, both are NaN
                raise ValueError("the values contain NaN or infinity")
            block = block.to(torch.float64, copy=True)
            if max(-low, high) > self.bound:
                clipped += int((block.abs() > self.bound).sum())
                block.clamp_(-self.bound, self.bound)
            integers = block.mul_(self.scale * weight).round_().to(getattr(torch, f"int{self.bits}"))
            signed[start : start + len(integers)] = integers.numpy()
        return clipped

    def decode(self, total: Integers) -> Float[Tensor, " n"]:
        """Decode an integer sum to the weighted sum of the values, in fp64."""
        signed = np.ascontiguousarray(total).view(f"<i{self.bits // 8}")
        return torch.from_numpy(signed.astype(np.float64)).div_(self.scale)
