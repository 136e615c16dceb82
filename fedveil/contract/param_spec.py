"""Named trained tensors, with their shapes and their roles in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, final

import torch
from torch import Tensor

__all__ = [
    "LazyMapping",
    "MadeWeights",
    "ParamLocation",
    "ParamSpec",
    "Spec",
    "Weights",
    "movable_names",
    "param_specs_of",
]

Weights = Mapping[str, Tensor]
_Kind = TypeVar("_Kind")


@final
class LazyMapping(Mapping[str, _Kind]):
    """A mapping whose values are computed at every access, so that they are never all in memory."""

    def __init__(self, names: Iterable[str], make: Callable[[str], _Kind]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> _Kind:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


MadeWeights = LazyMapping[Tensor]


@dataclass(frozen=True)
class ParamLocation:
    """The role of a tensor in its model, to the extent that methods need it.

    Attributes:
        part: "linear", a matrix or bias of an attention or MLP layer; "embedding", a token embedding or an output head.
        columns: name of the layer that the columns belong to; tensors with the same name share one mask.
        axis: the axis of the output features.
        closes: True for the last layer of an attention or MLP block, which writes to the hidden state.
    """

    part: Literal["linear", "embedding"]
    columns: str
    axis: int
    closes: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """Shape and dtype of one trained tensor, and its location if the adapter trains the model's own tensors.

    `fixed` means that the model uses the tensor but training does not change it. It has no gradient, not even per
    example.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    place: ParamLocation | None = None
    fixed: bool = False


Spec = Mapping[str, ParamSpec]


def movable_names(spec: Spec) -> list[str]:
    """Return the names of the tensors that training changes, which have gradients: all except the fixed tensors."""
    return [name for name, tensor in spec.items() if not tensor.fixed]


def param_specs_of(weights: Weights) -> Spec:
    """Return the spec of `weights`, without locations."""
    return {name: ParamSpec(tuple(w.shape), w.dtype) for name, w in weights.items()}
