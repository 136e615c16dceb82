"""The optimiser of local training, by train.optimiser.

| name | states, bytes a weight | |
|---|---|---|
| "adamw" | 8 | torch's own |
| "adamw-8bit" | 2 | bitsandbytes' AdamW (Dettmers et al. 2022): 8 bits a state, a scale a block of 256 |

Of tensors below 4,096 entries, bitsandbytes keeps states of 32 bits.
"""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor

from fedveil.config import TrainConfig

_PIECE = 1 << 20  # entries, whole blocks: what bitsandbytes computes with on a CPU is five times as large
_SMALLEST = 4096  # entries of a tensor whose states have 8 bits


class Optimiser(Protocol):
    """What local training needs of one."""

    def step(self) -> Any:
        """Moves the parameters by their gradients."""
        ...

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        ...


def create(parameters: list[Tensor], train: TrainConfig) -> Optimiser:
    """A new optimiser. On a GPU a whole step of AdamW is one kernel for many tensors."""
    on_gpu = all(p.is_cuda for p in parameters)
    if train.optimiser == "adamw-8bit":
        return _eight_bit(parameters, train) if on_gpu else _Pieces(parameters, train)
    fused = True if on_gpu else None
    return torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=fused)


def _eight_bit(parameters: list[Tensor], train: TrainConfig) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of the flat tensor. The last one is never so small that its states would have 32 bits."""
    whole = max(0, tensor.numel() - _SMALLEST) // _PIECE
    return torch.split(tensor.reshape(-1), [_PIECE] * whole + [tensor.numel() - whole * _PIECE])


@final
class _Pieces:
    """AdamW of 8 bits that takes large tensors in pieces of whole blocks, which changes no bit of the result."""

    def __init__(self, parameters: list[Tensor], train: TrainConfig) -> None:
        self._parameters = parameters
        self._pieces = [[torch.nn.Parameter(part) for part in _split(p.detach())] for p in parameters]
        self._inner = _eight_bit([piece for pieces in self._pieces for piece in pieces], train)

    def step(self) -> None:
        """Moves the parameters by their gradients."""
        for parameter, pieces in zip(self._parameters, self._pieces, strict=True):
            grads = [None] * len(pieces) if parameter.grad is None else _split(parameter.grad)
            for piece, grad in zip(pieces, grads, strict=True):
                piece.grad = grad
        self._inner.step()
        self._inner.zero_grad()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
