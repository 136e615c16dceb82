"""What may be on the wire: fields, words, and the payloads that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedveil.contract.codec import Codec, Value

Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Field:
    """One field on the wire.

    Attributes:
        name: unique within its direction.
        direction: "down" (server to client) or "up" (client to server).
        codec: how the value becomes bytes.
        shape: entries of the value; None stands for a length that only the sender knows.
        unit: what an entry is, for the wire table ("weight", "mask bit", ...).
        variants: the payload variants that carry it; empty means every payload of its direction.
        when: the same in words, for the wire table.
    """

    name: str
    direction: Direction
    codec: Codec
    shape: tuple[int | None, ...]
    unit: str = "weight"
    variants: tuple[str, ...] = ()
    when: str = "always"


@dataclass(frozen=True)
class Word:
    """A value outside the tensors that every payload of its direction carries: one of a few public choices."""

    name: str
    direction: Direction
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Everything that may be on the wire, in both directions. What is not here is refused.

    Attributes:
        fields: the tensors.
        scalars: words that every payload of a direction carries beside its tensors.
    """

    fields: tuple[Field, ...]
    scalars: tuple[Word, ...] = ()

    def variants(self, direction: Direction) -> tuple[str, ...]:
        """Names of the payload variants of one direction; ("",) when there is only one form."""
        named = {v for f in self.fields if f.direction == direction for v in f.variants}
        return tuple(sorted(named)) or ("",)

    def fields_of(self, direction: Direction, variant: str) -> dict[str, Field]:
        """The fields that a payload of this direction and variant carries, all of them and no other."""
        return {
            f.name: f for f in self.fields if f.direction == direction and (not f.variants or variant in f.variants)
        }


@dataclass(frozen=True)
class Payload:
    """What one side hands to the other.

    Attributes:
        fields: values by name, as the layout declares them.
        variant: which of the layout's variants this is ("" where it has one form only).
        scalars: the layout's words of this direction.
    """

    fields: Mapping[str, Value]
    variant: str = ""
    scalars: Mapping[str, str] = field(default_factory=dict)
