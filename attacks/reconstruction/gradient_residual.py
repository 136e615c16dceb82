"""Residual between a candidate image's gradient and a client's upload, at the observed entries.

    r(u) = m o (grad_w L(f_w(T u), y) - g) / ||m o g||       (see `gradient_matching`)

| case | result |
|---|---|
| nothing observed | ValueError |
| several exchanges | one residual over all exchanges, each at its own weights |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

from fedveil.attacks.reconstruction.observed_gradients import ObservedGradient

__all__ = ["GradientResidual", "Map", "residual_of"]

Map = Callable[[Tensor], Tensor]

_CHUNK = 64  # columns of the Jacobian at a time


@dataclass(frozen=True)
class GradientResidual:
    """r(u) over all exchanges.

    Attributes:
        sent: returns the observed entries of the gradient of the mean loss, for images with these labels.
        targets: those entries as the client sent them.
        labels: classes of the batch.
        size: ||m o g||.
    """

    sent: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    labels: Tensor
    size: Tensor

    def __call__(self, unknown: Tensor) -> Tensor:
        """Return the residual of these images, shape (entries,)."""
        return (self.sent(unknown, self.labels) - self.targets) / self.size

    def jacobian(self, unknown: Tensor) -> Tensor:
        """Return the Jacobian (entries, unknowns), image by image: the gradient of the mean loss is their mean."""
        count, each = len(self.labels), unknown[0].numel()
        eye = torch.eye(each, dtype=unknown.dtype, device=unknown.device)
        columns = []
        for image, label in zip(unknown.flatten(1), self.labels, strict=True):

            def alone(flat: Tensor, label: Tensor = label) -> Tensor:
                return self.sent(flat.reshape(1, *unknown.shape[1:]), label[None])

            columns.append(vmap(lambda v, at=image, f=alone: jvp(f, (at,), (v,))[1], chunk_size=_CHUNK)(eye))
        return torch.cat(columns).T / (count * self.size)


def residual_of(
    model: nn.Module, observed: Sequence[ObservedGradient], labels: Tensor, upsample: Map | None, kind: torch.dtype
) -> GradientResidual:
    """Create the residual for observed gradients at this precision. Raises ValueError if nothing was observed."""
    _load_forward_mode()
    parts: list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor]] = []
    targets: list[Tensor] = []
    device = labels.device
    for each in observed:
        state = {**model.state_dict(), **(each.weights or {})}
        state = {n: t.to(device, kind if t.is_floating_point() else t.dtype) for n, t in state.items()}
        matched = {n: state.pop(n) for n in each.values}
        # Use an index, not a mask, because no shape may depend on values under vmap.
        index = torch.cat([each.seen[n].flatten() for n in matched]).nonzero().flatten().to(device)
        targets.append(torch.cat([each.values[n].detach().flatten() for n in matched]).to(device, kind)[index])
        parts.append((matched, state, index))
    if not sum(target.numel() for target in targets):
        raise ValueError("no entry of the gradient was observed")

    def sent(unknown: Tensor, of: Tensor) -> Tensor:
        images = upsample(unknown) if upsample else unknown
        rows = []
        for matched, rest, index in parts:

            def loss(weights: dict[str, Tensor], rest: dict[str, Tensor] = rest) -> Tensor:
                logits = functional_call(model, {**rest, **weights}, (images,)).logits
                mean: Tensor = functional.cross_entropy(logits, of)
                return mean

            rows.append(torch.cat([g.flatten() for g in grad(loss)(matched).values()])[index])
        return torch.cat(rows)

    joined = torch.cat(targets)
    return GradientResidual(sent, joined, labels, joined.norm().clamp_min(torch.finfo(kind).tiny))


def _load_forward_mode() -> None:
    """Load torch's forward-mode derivatives without the warning that torch 2.15 gives about its own code.

    The rules call torch.jit.script, which is deprecated. torch loads the rules at a process's first derivative.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", FutureWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
