"""Gradients as observed in messages: their values, and the entries that were actually sent.

| case | result |
|---|---|
| masks of random binary weights, in any encoding | public: an entry is observed if its mask bit is one |
| a tensor that was not sent (fixed position) | not in any `ObservedGradient`, so it is not matched |
| a true zero under an implicit mask | not observed, like a withheld entry |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.contract.layout import Payload
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Spec
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire.payloads import payload_tensors

__all__ = ["ObservedGradient", "observe_all_entries", "observe_upload", "subsample_entries"]


@dataclass(frozen=True)
class ObservedGradient:
    """Observable part of a gradient in one message exchange.

    Attributes:
        values: gradient by parameter name. Values at withheld entries are not read.
        seen: same names and shapes, true where an entry was sent. A tensor missing from both is not
            matched.
        weights: weights at which the gradient was computed; None means the model's own.
    """

    values: Mapping[str, Tensor]
    seen: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] | None = None


def observe_all_entries(gradients: Mapping[str, Tensor]) -> ObservedGradient:
    """Treat every entry as sent. On masked gradients, this means treating zeros as data."""
    return ObservedGradient(gradients, {n: torch.ones_like(g, dtype=torch.bool) for n, g in gradients.items()})


def observe_upload(method: Method, payload: Payload, spec: Spec) -> ObservedGradient:
    """Extract the observed gradient from an upload, without masked entries and tensors that were not sent."""
    if not isinstance(method, RandomBinary):
        return observe_all_entries(payload_tensors(payload))
    entries = list(method.surviving(payload, {name: tuple(tensor.shape) for name, tensor in spec.items()}))
    values = {name: value for name, value, _ in entries}
    return ObservedGradient(
        values, {n: torch.ones_like(v, dtype=torch.bool) if m is None else m for n, v, m in entries}
    )


def subsample_entries(observed: ObservedGradient, most: int, generator: torch.Generator) -> ObservedGradient:
    """Keep about `most` observed entries, drawn at random, for a smaller Jacobian that still has enough equations."""
    total = sum(int(seen.sum()) for seen in observed.seen.values())
    if total <= most:
        return observed
    seen = {n: s & (torch.rand(s.shape, generator=generator) < most / total) for n, s in observed.seen.items()}
    return ObservedGradient(observed.values, seen, observed.weights)
