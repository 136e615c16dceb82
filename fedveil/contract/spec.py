"""Tensors by name: what is trained, of which shape, and where it stands in its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Place:
    """What a tensor is in its model, as far as a method has to know.

    Attributes:
        part: "linear", a matrix or bias of an attention or MLP layer; "embedding", of tokens, or an output head.
        columns: name of the layer whose columns these are; tensors of one name have one mask.
        axis: of the output feature.
        closes: the layer is the last of its attention or MLP: it writes to the hidden state.
    """

    part: Literal["linear", "embedding"]
    columns: str
    axis: int
    closes: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one trained tensor; its place in the model, where the adapter trains the model's own tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    place: Place | None = None


Spec = Mapping[str, TensorSpec]


def spec_of(weights: Weights) -> Spec:
    """The spec that `weights` fulfils."""
    return {name: TensorSpec(tuple(w.shape), w.dtype) for name, w in weights.items()}
