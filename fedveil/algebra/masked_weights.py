"""Weights with columns left out and matrices as codes: one form on the wire for both directions.

On the wire: the visible columns of every masked tensor, packed; one bit a column for each masked layer, as
"visible.<layer>"; codes where a quantiser is given, their blocks over the packed entries; all other tensors whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fedveil.algebra.columns import along, pack, unpack
from fedveil.algebra.quantise import Quantiser
from fedveil.contract.codec import Coded, Value
from fedveil.contract.layout import Direction, Field, Payload
from fedveil.contract.spec import Place, Spec, Weights
from fedveil.errors import WireError
from fedveil.wire.bits import Bits
from fedveil.wire.dense import Dense

_VISIBLE = "visible."


@dataclass(frozen=True)
class Veil:
    """What is left out, and how the rest travels.

    Attributes:
        spec: all tensors.
        masked: places of the tensors of which columns are masked.
        coders: quantisers of the tensors that travel as codes.
        dtype: of those that do not.
    """

    spec: Spec
    masked: Mapping[str, Place] = field(default_factory=dict)
    coders: Mapping[str, Quantiser] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> dict[str, int]:
        """Columns of every masked layer, by its name, in the order of names."""
        return dict(sorted((p.columns, self.spec[n].shape[p.axis]) for n, p in self.masked.items()))

    def close(self, weights: Weights, visible: Weights, scale: float = 1.0) -> dict[str, Value]:
        """The fields: visible columns times `scale`, and all else as it is."""
        fields: dict[str, Value] = {_VISIBLE + layer: mask for layer, mask in visible.items()}
        for name, w in weights.items():
            if name in self.masked:
                w = pack(w, visible[self.masked[name].columns], self.masked[name].axis)
                w = w.mul_(scale) if scale != 1.0 else w
            fields[name] = self.coders[name].quantise(w) if name in self.coders else w.to(self.dtype)
        return fields

    def visible(self, payload: Payload) -> dict[str, Tensor]:
        """The bits of a payload, by layer."""
        return {layer: cast(Tensor, payload.fields[_VISIBLE + layer]) for layer in self.columns}

    def open(self, payload: Payload) -> Iterator[tuple[str, Tensor]]:
        """Each tensor whole, one at a time; zeros for what is missing. Raises WireError as `check`."""
        self.check(payload)
        visible = self.visible(payload)
        for name in self.spec:
            value = payload.fields[name]
            found = self.coders[name].dequantise(cast(Coded, value)) if name in self.coders else cast(Tensor, value)
            if name in self.masked:
                place = self.masked[name]
                found = unpack(found, visible[place.columns], place.axis, self.spec[name].shape)
            yield name, found

    def seen(self, name: str, visible: Weights) -> Tensor:
        """True where a tensor's columns are visible, as it broadcasts over the tensor."""
        place = self.masked[name]
        return along(visible[place.columns], place.axis, len(self.spec[name].shape))

    def check(self, payload: Payload) -> None:
        """As many columns as the bits say, which a layout cannot. Raises WireError."""
        visible = self.visible(payload)
        for name, place in self.masked.items():
            value = payload.fields[name]
            found = (value.codes if isinstance(value, Coded) else cast(Tensor, value)).shape[place.axis]
            if found != (expected := int(visible[place.columns].sum())):
                raise WireError(f"{name}: expected {expected} columns, one for every one of its bits, found {found}")

    def fields(self, direction: Direction) -> tuple[Field, ...]:
        """What the layout has to say of it."""
        bits = tuple(Field(_VISIBLE + c, direction, Bits(), (n,), "column") for c, n in self.columns.items())
        dense, found = Dense(self.dtype), []
        for name, t in self.spec.items():
            axis = self.masked[name].axis if name in self.masked else None
            codec = self.coders[name].codec if name in self.coders else dense
            found.append(Field(name, direction, codec, tuple(None if i == axis else n for i, n in enumerate(t.shape))))
        return bits + tuple(found)
