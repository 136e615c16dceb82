"""What exchanges of gradients show: the values, and which entries were sent at all.

| case | result |
|---|---|
| masks of random binary weights, whatever their form on the wire | public: an entry is seen where its mask is one |
| a tensor that was not sent (fixed position) | in no `Observed`: it is not matched |
| a true zero under an implicit mask | not seen, like a withheld entry |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.contract.layout import Payload
from fedveil.contract.method import Method
from fedveil.contract.spec import Spec
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire.payloads import tensors_of


@dataclass(frozen=True)
class Observed:
    """What one exchange shows of a gradient.

    Attributes:
        values: the gradient by parameter name. What stands at a withheld entry is not read.
        seen: of the same names and shapes, true where an entry was sent. A tensor left out of both is not matched.
        weights: those that the gradient was taken at; None = the model's own.
    """

    values: Mapping[str, Tensor]
    seen: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] | None = None


def everything(gradients: Mapping[str, Tensor]) -> Observed:
    """Takes every entry as sent. On masked gradients this is the attack that takes zeros as data."""
    return Observed(gradients, {n: torch.ones_like(g, dtype=torch.bool) for n, g in gradients.items()})


def observed(method: Method, payload: Payload, spec: Spec) -> Observed:
    """What an upload of a gradient shows. Masked entries are not seen, and a tensor that was not sent is left out."""
    method = method
    if not isinstance(method, RandomBinary):
        return everything(tensors_of(payload))
    found = list(method.surviving(payload, {name: tuple(tensor.shape) for name, tensor in spec.items()}))
    values = {name: value for name, value, _ in found}
    return Observed(values, {n: torch.ones_like(v, dtype=torch.bool) if m is None else m for n, v, m in found})


def thinned(observed: Observed, most: int, generator: torch.Generator) -> Observed:
    """Keeps about `most` of the observed entries, drawn at random: a smaller Jacobian with enough equations."""
    total = sum(int(seen.sum()) for seen in observed.seen.values())
    if total <= most:
        return observed
    seen = {n: s & (torch.rand(s.shape, generator=generator) < most / total) for n, s in observed.seen.items()}
    return Observed(observed.values, seen, observed.weights)


def union(observed: Sequence[Observed]) -> Observed:
    """Merges exchanges of the same image at the same weights. An entry that several show is their mean.

    Raises:
        ValueError: no exchanges, or weights that differ.
    """
    if not observed or any(each.weights is not observed[0].weights for each in observed):
        raise ValueError(f"expected exchanges at the same weights, found {len(observed)} at weights that differ")
    values, seen = {}, {}
    for name in {name: None for each in observed for name in each.values}:
        shown = [each for each in observed if name in each.values]
        count = torch.stack([each.seen[name] for each in shown]).sum(0)
        total = torch.stack([each.values[name] * each.seen[name] for each in shown]).sum(0)
        values[name], seen[name] = total / count.clamp_min(1), count > 0
    return Observed(values, seen, observed[0].weights)
