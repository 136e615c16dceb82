"""What every adapter of low-rank pairs shares: its fields, and the initial draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedveil.contract.adapter import Adapter, Mount
from fedveil.contract.spec import Spec, TensorSpec
from fedveil.errors import ConfigError
from fedveil.rng import Stream

_WIDTHS = {"h.0.attn": (5, 7), "h.1.mlp": (7, 3), "h.2.mlp": (3, 4)}  # (d_in, d_out): of the example


@dataclass(frozen=True)
class Pairs(Adapter):
    """The fields of every adapter of low-rank pairs. Abstract: no `kind`."""

    mount: ClassVar[Mount] = "layers"
    rank: int = 8
    alpha: float | None = None
    targets: str = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, found {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"adapter.alpha: expected a number above 0, found {self.alpha}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def drawn(shapes: Mapping[str, tuple[int, ...]], rng: Stream, private_b_std: float = 0.0) -> dict[str, Tensor]:
    """Factors under the names of `shapes`: every A uniform within 1/sqrt(d_in), every B zero.

    A private B is zero too, unless `private_b_std`, the standard deviation of its entries, is above 0.
    """
    generator = rng.torch_generator()
    found = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, tensor in found.items():
        if name.endswith((".lora_A", ".private_A")):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        elif name.endswith(".private_B") and private_b_std:
            tensor.normal_(std=private_b_std, generator=generator)
    return {name: found[name] for name in shapes}


def example(rank: int, pairs: tuple[str, ...]) -> Spec:
    """Three layers of unequal widths, so that a method which shares the top two keeps one to itself."""
    return {
        f"{module}.{pair}_{side}": TensorSpec((rank, d_in) if side == "A" else (d_out, rank))
        for module, (d_in, d_out) in _WIDTHS.items()
        for pair in pairs
        for side in "AB"
    }


def unfit(targets: str, reason: str) -> ConfigError:
    """The error for targets that match no linear layer."""
    return ConfigError(
        f'adapter.targets: expected "all-linear" or a regular expression over the names of linear layers, '
        f'found "{targets}" ({reason})'
    )
