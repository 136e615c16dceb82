"""The weighted mean, folded one upload at a time.

    mean_j = mean_{j-1} + (n_j / N_j) (x_j - mean_{j-1}),   N_j = n_1 + ... + n_j

which is sum(n_j x_j) / N, in one in-place pass over an fp32 accumulator. Each name has its own N, so an upload may
carry some of the names only (FedRand's factor, FedQSN's visible columns).

| case | result |
|---|---|
| a name that no upload carried | `otherwise[name]`, the same tensor |
| all uploads equal | that upload, bit for bit |
| fp16 or bf16 uploads | accumulated in fp32 |
| weight 0 or below, NaN | ValueError: the intake gate refuses such uploads earlier |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK = 1 << 18  # entries; 1 MB in fp32


class WeightedMean:
    """A running mean by name. Holds one fp32 tensor a name, however many uploads are added."""

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}
        self._weight: dict[str, float] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Folds one upload. `tensors` are only read; they may be views of received bytes."""
        if not weight > 0:
            raise ValueError(f"weight: expected a number above 0, found {weight}")
        for name, value in tensors.items():
            total = self._weight.get(name, 0.0) + weight
            if name not in self._mean:
                self._mean[name] = value.to(torch.float32, copy=True)
            else:
                _blend(self._mean[name], value, weight / total)
            self._weight[name] = total

    def weight(self, name: str) -> float:
        """Sum of the weights that `name` was added with; 0 for a name never added."""
        return self._weight.get(name, 0.0)

    def result(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of every name of `otherwise`, in its dtype; `otherwise` itself where nothing was added."""
        return {name: self._mean[name].to(old.dtype) if name in self._mean else old for name, old in otherwise.items()}


def _blend(mean: Tensor, value: Tensor, share: float) -> None:
    """mean += share * (value - mean), in place. Half precision is widened block by block, not as a whole."""
    if value.dtype == torch.float32:
        mean.lerp_(value, share)
        return
    for part, block in zip(torch.split(mean.flatten(), _BLOCK), torch.split(value.flatten(), _BLOCK), strict=True):
        part.lerp_(block.to(torch.float32), share)
