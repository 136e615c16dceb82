"""Weights with masked columns omitted and matrices quantized, in the same form on the wire in both directions.

A message has the packed visible columns of every masked tensor; for each masked layer, one bit per column, as
"visible.<layer>"; codes if a quantizer is given, in blocks over the packed entries; and all other tensors whole.

A column is one of a layer's output features, on any axis of the tensor. A mask has one bit per column, True if the
column is visible. A weight and its bias share a mask, and so do an embedding and an output head that is not tied to it:
their columns are the features of the hidden state. A tied head is the same tensor as the embedding, with the same mask.

    pack(x, J)[..., j'] = x[..., j] for the visible columns j, J = positions(M), in their order
    unpack(pack(x, J), M) = x where M is True, 0 elsewhere

| case | result |
|---|---|
| every column visible | `pack_columns` copies; `unpack_columns` returns the original tensor |
| no column visible | an empty tensor; `unpack_columns` gives zeros |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from fedveil.contract.codec import QuantizedTensor, Value
from fedveil.contract.layout import Direction, Payload, WireField
from fedveil.contract.param_spec import MadeWeights, ParamLocation, Spec, Weights
from fedveil.errors import WireError
from fedveil.ops import quantization
from fedveil.ops.quantization import BlockQuantizer
from fedveil.wire.bits import BitCodec
from fedveil.wire.dense import DenseCodec

_VISIBLE = "visible."


@dataclass(frozen=True)
class MaskedWeightsCodec:
    """A codec that leaves out masked columns and sends the rest dense or quantized.

    Attributes:
        spec: all tensors.
        masked: locations of the tensors with masked columns.
        coders: quantizers for the tensors that are sent as codes.
        dtype: dtype of the tensors that are not quantized.
    """

    spec: Spec
    masked: Mapping[str, ParamLocation] = field(default_factory=dict)
    coders: Mapping[str, BlockQuantizer] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> dict[str, int]:
        """Return the number of columns in every masked layer, sorted by layer name."""
        return dict(sorted((p.columns, self.spec[n].shape[p.axis]) for n, p in self.masked.items()))

    def close(
        self,
        weights: Weights | Iterable[tuple[str, Tensor]],
        visible: Weights,
        scale: float = 1.0,
        device: torch.device | None = None,
    ) -> dict[str, Value]:
        """Return the fields on the wire: visible columns times `scale`, and all other tensors.

        `visible`: bits by layer. If `weights` are pairs of name and tensor, one pair is in memory at a time,
        along with the fields. With a `device`, masking and quantization happen there, and their results stay
        there. Raises TaskError if a value to be quantized is not finite.
        """
        fields: dict[str, Value] = {_VISIBLE + layer: mask for layer, mask in visible.items()}
        coded, positions = [], column_positions(visible, device)
        for name, w in weights.items() if isinstance(weights, Mapping) else weights:
            w = w.to(device) if name in self.masked or name in self.coders else w
            if name in self.masked:
                w = pack_columns(w, positions[self.masked[name].columns], self.masked[name].axis)
                w = w.mul_(scale) if scale != 1.0 else w
            if name in self.coders:
                coded.append(self.coders[name].coded(w))
                fields[name] = coded[-1]
            else:
                fields[name] = w.to(self.dtype)
            del w
        quantization.check_bits(coded)
        return fields

    def visible(self, payload: Payload) -> dict[str, Tensor]:
        """Return the masks in a payload, by layer."""
        return {layer: cast(Tensor, payload.fields[_VISIBLE + layer]) for layer in self.columns}

    def open(self, payload: Payload) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole tensor, one at a time, with zeros for missing columns. Raises WireError like `check`."""
        opened = self.opened(payload)
        for name in self.spec:
            yield name, opened[name]

    def opened(self, payload: Payload, device: torch.device | None = None) -> Weights:
        """Return the tensors from `open` as a mapping that computes a tensor on each access, on `device` if given.

        Raises WireError like `check`, immediately.
        """
        self.check(payload)
        return MadeWeights(self.spec, partial(self._made, payload, self.visible(payload), device))

    def _made(self, payload: Payload, visible: Weights, device: torch.device | None, name: str) -> Tensor:
        value = payload.fields[name]
        tensor = (
            self.coders[name].dequantise(cast(QuantizedTensor, value)) if name in self.coders else cast(Tensor, value)
        )
        tensor = tensor.to(device)
        if name not in self.masked:
            return tensor
        place = self.masked[name]
        return unpack_columns(tensor, visible[place.columns], place.axis, self.spec[name].shape)

    def seen(self, name: str, visible: Weights) -> Tensor:
        """Return True for the visible columns of the tensor `name`, in a shape that broadcasts over it."""
        place = self.masked[name]
        return broadcast_along(visible[place.columns], place.axis, len(self.spec[name].shape))

    def weights_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of `seen`'s result for the tensor `name`."""
        place, shape = self.masked[name], self.spec[name].shape
        return tuple(n if axis == place.axis else 1 for axis, n in enumerate(shape))

    def check(self, payload: Payload) -> None:
        """Raise WireError unless every masked tensor has as many columns as its mask has ones."""
        visible = self.visible(payload)
        for name, place in self.masked.items():
            value = payload.fields[name]
            column_count = (value.codes if isinstance(value, QuantizedTensor) else cast(Tensor, value)).shape[
                place.axis
            ]
            if column_count != (expected := int(visible[place.columns].sum())):
                raise WireError(
                    f"{name}: expected {expected} columns, as many as its mask has ones, found {column_count}"
                )

    def fields(self, direction: Direction) -> tuple[WireField, ...]:
        """Return the fields for a method's layout."""
        bits = tuple(WireField(_VISIBLE + c, direction, BitCodec(), (n,), "column") for c, n in self.columns.items())
        dense, tensor_fields = DenseCodec(self.dtype), []
        for name, t in self.spec.items():
            axis = self.masked[name].axis if name in self.masked else None
            codec = self.coders[name].codec if name in self.coders else dense
            shape = tuple(None if i == axis else n for i, n in enumerate(t.shape))
            tensor_fields.append(WireField(name, direction, codec, shape, most=tuple(t.shape)))
        return bits + tuple(tensor_fields)


def broadcast_along(row: Shaped[Tensor, " n"], axis: int, ndim: int) -> Shaped[Tensor, "..."]:
    """Return `row` (one value per column) as a view that broadcasts over a tensor with `ndim` axes."""
    return row.reshape([-1 if i == axis else 1 for i in range(ndim)])


def column_positions(visible: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return each layer's visible columns, ascending, on `device`, in a single copy: each copy waits for the GPU."""
    found = {layer: mask.nonzero().squeeze(1) for layer, mask in visible.items()}
    if not found or device is None:
        return found
    there = torch.cat(list(found.values())).to(device)
    return dict(zip(found, torch.split(there, [len(places) for places in found.values()]), strict=True))


def pack_columns(x: Shaped[Tensor, "..."], positions: Int64[Tensor, " m"], axis: int) -> Shaped[Tensor, "..."]:
    """Return the columns at these positions, contiguous."""
    return x.index_select(axis, positions.to(x.device))


def unpack_columns(
    packed: Shaped[Tensor, "..."], visible: Bool[Tensor, " n"], axis: int, shape: tuple[int, ...]
) -> Shaped[Tensor, "..."]:
    """Invert `pack_columns`, with zeros for the missing columns."""
    whole = torch.zeros(shape, dtype=packed.dtype, device=packed.device)
    return whole.index_copy_(axis, visible.nonzero().squeeze(1).to(packed.device), packed)
