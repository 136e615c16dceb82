"""Columns of weights: the output features of a layer, whichever axis holds them. Masks over them, and their algebra.

A mask has one bit a column, True where the column is visible. A weight and its bias share it, and so do an embedding and
an output head that is not tied to it: their columns are the features of the hidden state. A tied head is one tensor
with the embedding and so has its mask anyway.

    pack(x, M)[..., j'] = x[..., j] for the visible columns j, in their order
    unpack(pack(x, M), M) = x where M is True, 0 elsewhere

| case | result |
|---|---|
| every column visible | `pack` copies; `unpack` of it is the tensor |
| no column visible | an empty tensor; `unpack` gives zeros |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


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


def along(row: Shaped[Tensor, " n"], axis: int, ndim: int) -> Shaped[Tensor, "..."]:
    """One value a column, as a view that broadcasts over a tensor of `ndim` axes."""
    return row.reshape([-1 if i == axis else 1 for i in range(ndim)])


def pack(x: Shaped[Tensor, "..."], visible: Bool[Tensor, " n"], axis: int) -> Shaped[Tensor, "..."]:
    """The visible columns, contiguous."""
    return x.index_select(axis, visible.nonzero().squeeze(1).to(x.device))


def packed_shape(shape: tuple[int, ...], visible: Bool[Tensor, " n"], axis: int) -> tuple[int, ...]:
    """The shape of `pack` of a tensor of `shape`."""
    return (*shape[:axis], int(visible.sum()), *shape[axis + 1 :])


def unpack(
    packed: Shaped[Tensor, "..."], visible: Bool[Tensor, " n"], axis: int, shape: tuple[int, ...]
) -> Shaped[Tensor, "..."]:
    """The columns back in their places, zeros elsewhere; `packed` has the shape `packed_shape`."""
    whole = torch.zeros(shape, dtype=packed.dtype, device=packed.device)
    return whole.index_copy_(axis, visible.nonzero().squeeze(1).to(packed.device), packed)
