"""Weights with columns left out and matrices coded, in the same form on the wire in both directions.

The wire carries the visible columns of every masked tensor, packed; for each masked layer one bit a column, as
"visible.<layer>"; codes where a quantiser is given, in blocks over the packed entries; and all other tensors whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedveil.algebra import quantise
from fedveil.algebra.columns import along, pack, positions, unpack
from fedveil.algebra.quantise import Quantiser
from fedveil.contract.codec import Coded, Value
from fedveil.contract.layout import Direction, Field, Payload
from fedveil.contract.spec import MadeWeights, Place, Spec, Weights
from fedveil.errors import WireError
from fedveil.wire.bits import Bits
from fedveil.wire.dense import Dense

_VISIBLE = "visible."


@dataclass(frozen=True)
class Veil:
    """Which columns are left out, and in which form the rest is sent.

    Attributes:
        spec: all tensors.
        masked: places of the tensors with masked columns.
        coders: quantisers of the tensors that are sent as codes.
        dtype: of the tensors that are not coded.
    """

    spec: Spec
    masked: Mapping[str, Place] = field(default_factory=dict)
    coders: Mapping[str, Quantiser] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> dict[str, int]:
        """The number of columns of every masked layer, by layer name, sorted."""
        return dict(sorted((p.columns, self.spec[n].shape[p.axis]) for n, p in self.masked.items()))

    def close(
        self,
        weights: Weights | Iterable[tuple[str, Tensor]],
        visible: Weights,
        scale: float = 1.0,
        device: torch.device | None = None,
    ) -> dict[str, Value]:
        """The fields on the wire: visible columns times `scale`, and all other tensors. `visible`: bits by layer.

        Of pairs of name and tensor, one is in memory at a time, beside the fields. With a `device`, what is masked or
        coded is so there, and stays there. Raises TaskError where a value that is to be coded is not finite.
        """
        fields: dict[str, Value] = {_VISIBLE + layer: mask for layer, mask in visible.items()}
        coded, shown = [], positions(visible, device)
        for name, w in weights.items() if isinstance(weights, Mapping) else weights:
            w = w.to(device) if name in self.masked or name in self.coders else w
            if name in self.masked:
                w = pack(w, shown[self.masked[name].columns], self.masked[name].axis)
                w = w.mul_(scale) if scale != 1.0 else w
            if name in self.coders:
                coded.append(self.coders[name].coded(w))
                fields[name] = coded[-1]
            else:
                fields[name] = w.to(self.dtype)
            del w
        quantise.check(coded)
        return fields

    def visible(self, payload: Payload) -> dict[str, Tensor]:
        """The masks in a payload, by layer."""
        return {layer: cast(Tensor, payload.fields[_VISIBLE + layer]) for layer in self.columns}

    def open(self, payload: Payload) -> Iterator[tuple[str, Tensor]]:
        """Each tensor whole, one at a time, with zeros for missing columns. Raises WireError as `check` does."""
        opened = self.opened(payload)
        for name in self.spec:
            yield name, opened[name]

    def opened(self, payload: Payload, device: torch.device | None = None) -> Weights:
        """The same as a mapping, whose tensors are made at every access, on `device` if one is named.

        Raises WireError as `check` does, at once.
        """
        self.check(payload)
        return MadeWeights(self.spec, partial(self._made, payload, self.visible(payload), device))

    def _made(self, payload: Payload, visible: Weights, device: torch.device | None, name: str) -> Tensor:
        value = payload.fields[name]
        found = self.coders[name].dequantise(cast(Coded, value)) if name in self.coders else cast(Tensor, value)
        found = found.to(device)
        if name not in self.masked:
            return found
        place = self.masked[name]
        return unpack(found, visible[place.columns], place.axis, self.spec[name].shape)

    def seen(self, name: str, visible: Weights) -> Tensor:
        """True for the visible columns of the tensor `name`, in a shape that broadcasts over it."""
        place = self.masked[name]
        return along(visible[place.columns], place.axis, len(self.spec[name].shape))

    def weights_shape(self, name: str) -> tuple[int, ...]:
        """The shape of what `seen` gives for the tensor `name`."""
        place, shape = self.masked[name], self.spec[name].shape
        return tuple(n if axis == place.axis else 1 for axis, n in enumerate(shape))

    def check(self, payload: Payload) -> None:
        """Raises WireError unless every masked tensor has as many columns as its mask has ones."""
        visible = self.visible(payload)
        for name, place in self.masked.items():
            value = payload.fields[name]
            found = (value.codes if isinstance(value, Coded) else cast(Tensor, value)).shape[place.axis]
            if found != (expected := int(visible[place.columns].sum())):
                raise WireError(f"{name}: expected {expected} columns, as many as its mask has ones, found {found}")

    def fields(self, direction: Direction) -> tuple[Field, ...]:
        """The fields of a method's layout."""
        bits = tuple(Field(_VISIBLE + c, direction, Bits(), (n,), "column") for c, n in self.columns.items())
        dense, found = Dense(self.dtype), []
        for name, t in self.spec.items():
            axis = self.masked[name].axis if name in self.masked else None
            codec = self.coders[name].codec if name in self.coders else dense
            shape = tuple(None if i == axis else n for i, n in enumerate(t.shape))
            found.append(Field(name, direction, codec, shape, most=tuple(t.shape)))
        return bits + tuple(found)
