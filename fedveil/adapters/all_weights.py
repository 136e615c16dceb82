"""Train and exchange every parameter of the base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import export
from fedveil.contract.adapter import Adapter, AttachedModel, Mount
from fedveil.contract.param_spec import ParamLocation, ParamSpec, Spec, Weights
from fedveil.rng import RandomStream

__all__ = ["AllWeightsAdapter"]


@final
@dataclass(frozen=True)
class AllWeightsAdapter(Adapter):
    """Every parameter of the base model is trained and exchanged."""

    mount: ClassVar[Mount] = "layers"
    kind: Literal["all"] = "all"

    @property
    @override
    def trains_base(self) -> bool:
        return True

    @override
    def example_spec(self) -> Spec:
        return {
            "wte.weight": ParamSpec((11, 4), place=ParamLocation("embedding", "wte", 1)),
            "position_embeddings": ParamSpec((6, 4)),
            "h.0.mlp.weight": ParamSpec((4, 4), place=ParamLocation("linear", "h.0.mlp", 1, closes=True)),
            "h.0.mlp.bias": ParamSpec((4,), place=ParamLocation("linear", "h.0.mlp", 0, closes=True)),
        }

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Return copies of the base's own weights; nothing is drawn at random."""
        return {name: base[name].clone() for name in shapes}

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Return all parameters of `model`; tied parameters appear once."""
        return dict(model.named_parameters())

    @override
    def save(self, folder: Path, attached: AttachedModel, weights: Weights) -> None:
        """Write the whole model with its tokenizer or processor, in transformers' format."""
        export.write_merged(folder, attached)

    @override
    @torch.no_grad()
    def merge(self, plain: AttachedModel, weights: Weights) -> None:
        """Replace the base's weights with `weights`."""
        for name, weight in weights.items():
            plain.model.get_parameter(plain.names[name]).copy_(weight)
