"""The proximal term, which pulls trained weights towards a center. FedProx and Ditto share it."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.contract.param_spec import Weights
from fedveil.contract.trainer import Penalty

__all__ = ["proximal_penalty"]


def proximal_penalty(strength: float, center: Weights) -> Penalty | None:
    """Return the penalty strength / 2 ||w - center||^2, or None if the strength is 0.

    The center is copied to the weights' device once.
    """
    if not strength:
        return None
    there: dict[str, Tensor] = {}

    def penalty(now: Weights) -> Tensor:
        if not there:
            there.update({name: center[name].to(w) for name, w in now.items()})
        return strength / 2 * torch.stack([(w - there[name]).square().sum() for name, w in now.items()]).sum()

    return penalty
