"""Entry-wise means that single clients cannot move far: the median and the trimmed mean (Yin et al. 2018).

The c values that clients sent for an entry are sorted, t are dropped at each end, and the rest are averaged.

    trimmed mean: t = floor(trim * c), at most (c - 1) / 2        median: t = floor((c - 1) / 2)

Formal guarantee: if at most t of the c values are hostile, the result lies between the smallest and the largest value
of the others. This holds for every entry separately, and does not restrict values inside that range: hostile clients
that stay within it can still move the result, and a majority determines it.

| case | result |
|---|---|
| weights | not used: a client could claim any; `weight` still gives their sum |
| masks | c counts the clients whose mask is True at the entry; without any, zero, and `moved` is False |
| memory | all of the round's values, whereas `RunningSums` holds one |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedveil.contract.contributions import ClientContributions

_BLOCK = 1 << 16  # entries at a time


@final
class RobustAggregator:
    """Implements `fedveil.contract.contributions.AggregateSums`; `trim` = 0.5 is the median."""

    def __init__(self, trim: float) -> None:
        self._trim = trim
        self._held: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        self._weight: dict[str, float] = {}
        self._mean: dict[str, Tensor] = {}
        self.examples = 0
        self.clear: dict[str, Mapping[str, str | float]] = {}

    def add(self, client: str, num_examples: int, terms: ClientContributions) -> None:
        """Store all of one client's terms."""
        for term in terms.tensors:
            self._held.setdefault(term.name, []).append((term.value, term.mask))
            self._weight[term.name] = self._weight.get(term.name, 0.0) + term.weight
        self.examples += num_examples
        self.clear[client] = terms.clear

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def weight(self, name: str) -> float:
        """Return the sum of the weights that clients gave; 0.0 if no client sent the name."""
        return self._weight.get(name, 0.0)

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """Return the median or trimmed mean, fp32; zero where no client's mask is True."""
        if name not in self._mean:
            entries, shape = self._held[name], self._held[name][0][0].shape
            flat_mean, everywhere = torch.empty(shape.numel()), torch.ones(1, dtype=torch.bool).expand(shape.numel())
            values = [value.reshape(-1) for value, _ in entries]
            masks = [everywhere if mask is None else mask.reshape(-1) for _, mask in entries]
            for start in range(0, len(flat_mean), _BLOCK):
                part = slice(start, start + _BLOCK)
                rows = torch.stack([value[part].float() for value in values])
                flat_mean[part] = self._of(rows, torch.stack([mask[part] for mask in masks]))
            self._mean[name] = flat_mean.reshape(shape)
        return self._mean[name]

    def take(self, name: str) -> Float[Tensor, "..."]:
        """Remove the mean from the sums and return it."""
        mean = self.mean(name)
        del self._mean[name]
        return mean

    def _of(self, values: Float[Tensor, "k n"], masks: Bool[Tensor, "k n"]) -> Float[Tensor, " n"]:
        count = masks.sum(0)
        ordered = values.masked_fill(~masks, torch.inf).sort(0).values
        left_out = torch.minimum((self._trim * count).long(), (count - 1).clamp(min=0) // 2)
        place = torch.arange(len(values))[:, None]
        inlier_mask = (place >= left_out) & (place < count - left_out)
        return torch.where(inlier_mask, ordered, 0.0).sum(0) / inlier_mask.sum(0).clamp(min=1)

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """Return True where at least one client's mask is True; everywhere for a name without masks."""
        masks = [mask for _, mask in self._held[name] if mask is not None]
        everywhere = torch.ones(self._held[name][0][0].shape, dtype=torch.bool)
        return torch.stack(masks).any(0) if masks else everywhere

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the result for every name of `otherwise`, in its dtype; its own tensor if no client sent the name."""
        return {name: self.mean(name).to(old.dtype) if name in self else old for name, old in otherwise.items()}
