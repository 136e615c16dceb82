"""A round's sums as running means, folded in one term at a time.

    mean_j = mean_{j-1} + (w_j m_j / W_j) (x_j - mean_{j-1}),   W_j = w_1 m_1 + ... + w_j m_j

in one in-place pass over an fp32 accumulator. W is a number for a name without masks, and a tensor for a name with
masks. For masks that are constant along an axis (expanded tensors, as for whole columns), W has one entry there.

| case | result |
|---|---|
| a name that no client sent | it is not in the sums; `means` returns `otherwise[name]`, the same tensor |
| all terms equal | the mean is that value, bit for bit |
| fp16 or bf16 values | accumulated in fp32 |
| a weight that is NaN, 0 or negative | ValueError; upload validation refuses such uploads earlier |
| a name with a mask in one term and without one in another | ValueError: the method has a bug |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedveil.contract.contributions import ClientContributions

_BLOCK = 1 << 18  # entries; 1 MB in fp32


@final
class RunningSums:
    """Implements `fedveil.contract.contributions.AggregateSums`. Holds at most two fp32 tensors per name for any number
    of clients; only one if masks omit whole columns.
    """

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}
        self._weight: dict[str, Tensor | float] = {}
        self._wide = torch.empty(0)  # a half-precision block, widened; a new buffer per block would cost page faults
        self.examples = 0
        self.clear: dict[str, Mapping[str, str | float]] = {}

    def add(self, client: str, num_examples: int, terms: ClientContributions) -> None:
        """Add all of one client's terms."""
        for term in terms.tensors:
            self.fold(term.name, term.value, term.weight, term.mask)
        self.examples += num_examples
        self.clear[client] = terms.clear

    def fold(
        self, name: str, value: Float[Tensor, "*s"], weight: float, mask: Bool[Tensor, "*s"] | None = None
    ) -> None:
        """Add one tensor, without changing it."""
        if not weight > 0:
            raise ValueError(f"weight: expected a number above 0, found {weight}")
        if (mask is None) is isinstance(self._weight.get(name), Tensor) and name in self._weight:
            raise ValueError(f"{name}: some clients sent a mask and others none; a mask must come from all or none")
        if mask is not None:
            self._fold_masked(name, value, weight, mask)
            return
        total = float(self._weight.get(name, 0.0)) + weight
        if name not in self._mean:
            # Contiguous for any strides of the value, because `_blend` writes through a flat view.
            in_order = torch.contiguous_format
            self._mean[name] = torch.empty_like(value, dtype=torch.float32, memory_format=in_order).copy_(value)
        else:
            self._blend(self._mean[name], value, weight / total)
        self._weight[name] = total

    def _blend(self, mean: Tensor, value: Tensor, share: float) -> None:
        """Compute mean += share * (value - mean) in place. Half precision is widened block by block, in the cache."""
        if value.dtype == torch.float32:
            mean.lerp_(value, share)
            return
        if not len(self._wide):
            self._wide = mean.new_empty(_BLOCK)
        for part, block in zip(torch.split(mean.flatten(), _BLOCK), torch.split(value.flatten(), _BLOCK), strict=True):
            part.lerp_(self._wide[: len(block)].copy_(block), share)

    def _fold_masked(self, name: str, value: Tensor, weight: float, mask: Tensor) -> None:
        mean = self._mean.setdefault(name, torch.zeros(value.shape))
        mask = _narrow(mask)
        total = self._weight.get(name, torch.zeros(mask.shape))
        assert isinstance(total, Tensor)  # see `fold`
        if total.shape != mask.shape:
            total = total + torch.zeros(mask.shape)  # with the axes of both
        self._weight[name] = total.add_(mask, alpha=weight)
        # torch divides a plain number by a tensor by using the reciprocal, so 97 / 97 would not be 1.
        mean.lerp_(value.to(torch.float32), torch.where(mask, torch.tensor(weight) / total, 0.0))

    def __contains__(self, name: str) -> bool:
        return name in self._mean

    def weight(self, name: str) -> float:
        """Return the sum of the weights for a name without masks; 0.0 if no client sent the name."""
        weight_sum = self._weight.get(name, 0.0)
        if isinstance(weight_sum, Tensor):
            raise ValueError(f"{name}: its masks give every entry its own weight; a single one was asked for")
        return weight_sum

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """Return the weighted mean, fp32; zero where no client's mask is True."""
        return self._mean[name]

    def take(self, name: str) -> Float[Tensor, "..."]:
        """Remove the mean from the sums and return it."""
        return self._mean.pop(name)

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """Return True where at least one client's mask is True; everywhere for a name without masks. Read-only."""
        weight = self._weight[name]
        some = weight > 0 if isinstance(weight, Tensor) else torch.ones((), dtype=torch.bool)
        return some.expand(self._mean[name].shape)

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean for every name of `otherwise`, in its dtype; its own tensor if no client sent the name."""
        return {name: self._mean[name].to(old.dtype) if name in self._mean else old for name, old in otherwise.items()}


def _narrow(mask: Tensor) -> Tensor:
    """Return the mask with one entry along each axis that it is expanded over."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
