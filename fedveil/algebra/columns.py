"""Masks over the columns of weights. A column is an output feature of a layer, whichever axis of the tensor holds it.

A mask has one bit a column, True where the column is visible. A weight and its bias share it, and so do an embedding
and an output head that is not tied to it: their columns are the features of the hidden state. A tied head is the same
tensor as the embedding and so has its mask.

    pack(x, J)[..., j'] = x[..., j] for the visible columns j, J = positions(M), in their order
    unpack(pack(x, J), M) = x where M is True, 0 elsewhere

| case | result |
|---|---|
| every column visible | `pack` copies; `unpack` of it is the tensor |
| no column visible | an empty tensor; `unpack` gives zeros |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor


def along(row: Shaped[Tensor, " n"], axis: int, ndim: int) -> Shaped[Tensor, "..."]:
    """`row` (one value a column) as a view that broadcasts over a tensor of `ndim` axes."""
    return row.reshape([-1 if i == axis else 1 for i in range(ndim)])


def positions(visible: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """The visible columns of each layer, ascending, on `device`; in one copy, for each waits for the GPU."""
    found = {layer: mask.nonzero().squeeze(1) for layer, mask in visible.items()}
    if not found or device is None:
        return found
    there = torch.cat(list(found.values())).to(device)
    return dict(zip(found, torch.split(there, [len(places) for places in found.values()]), strict=True))


def pack(x: Shaped[Tensor, "..."], positions: Int64[Tensor, " m"], axis: int) -> Shaped[Tensor, "..."]:
    """The columns at these positions, contiguous."""
    return x.index_select(axis, positions.to(x.device))


def packed_shape(shape: tuple[int, ...], visible: Bool[Tensor, " n"], axis: int) -> tuple[int, ...]:
    """The shape of `pack` of a tensor of `shape`."""
    return (*shape[:axis], int(visible.sum()), *shape[axis + 1 :])


def unpack(
    packed: Shaped[Tensor, "..."], visible: Bool[Tensor, " n"], axis: int, shape: tuple[int, ...]
) -> Shaped[Tensor, "..."]:
    """The inverse of `pack`, with zeros for the missing columns; `packed` has the shape `packed_shape`."""
    whole = torch.zeros(shape, dtype=packed.dtype, device=packed.device)
    return whole.index_copy_(axis, visible.nonzero().squeeze(1).to(packed.device), packed)
