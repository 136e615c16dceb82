"""The messages allowed on the wire: fields, scalars, and the payloads that consist of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fedveil.contract.codec import Codec, Value

__all__ = ["Direction", "MessageLayout", "Payload", "ScalarField", "WireField"]

Direction = Literal["down", "up"]


@dataclass(frozen=True)
class WireField:
    """One field on the wire.

    Attributes:
        name: unique within its direction.
        direction: "down" (server to client) or "up" (client to server).
        codec: the codec that turns the value into bytes.
        shape: the value's shape; None stands for a length that only the sender knows.
        most: the largest shape, if `shape` has a None. It bounds a message's size before the message is read.
        unit: the unit of an entry, for the wire table ("weight", "mask bit", ...).
        variants: the payload variants that carry the field; empty means every payload in its direction.
        when: a description of when a payload carries the field, for the wire table.
    """

    name: str
    direction: Direction
    codec: Codec
    shape: tuple[int | None, ...]
    unit: str = "weight"
    variants: tuple[str, ...] = ()
    when: str = "always"
    most: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if None in self.shape and len(self.most) != len(self.shape):
            raise ValueError(
                f"{self.name}: shape {self.shape} contains None, so it needs `most`, a largest shape, found {self.most}"
            )

    @property
    def largest(self) -> tuple[int, ...]:
        """Return the largest shape that a value may have."""
        return self.most or tuple(n for n in self.shape if n is not None)


@dataclass(frozen=True)
class ScalarField:
    """A value from a few public choices, which every payload in its direction carries along with the tensors."""

    name: str
    direction: Direction
    choices: tuple[str, ...]


@dataclass(frozen=True)
class MessageLayout:
    """Everything allowed on the wire, in both directions. Both ends refuse anything else.

    Attributes:
        fields: the tensors.
        scalars: values that every payload in a direction carries along with its tensors.
    """

    fields: tuple[WireField, ...]
    scalars: tuple[ScalarField, ...] = ()

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Return 16 hex digits, equal on two ends if and only if their layouts agree on the wire."""
        lines = sorted(f"{f.direction} {f.name} {f.codec.name} {tuple(f.shape)} {f.variants}" for f in self.fields)
        lines += sorted(f"{word.direction} {word.name} {word.choices}" for word in self.scalars)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

    def variants(self, direction: Direction) -> tuple[str, ...]:
        """Return the names of the payload variants in one direction, or ("",) if there is only one variant."""
        named = {v for f in self.fields if f.direction == direction for v in f.variants}
        return tuple(sorted(named)) or ("",)

    def fields_of(self, direction: Direction, variant: str) -> dict[str, WireField]:
        """Return exactly the fields of a payload in this direction and variant."""
        return {
            f.name: f for f in self.fields if f.direction == direction and (not f.variants or variant in f.variants)
        }


@dataclass(frozen=True)
class Payload:
    """The content of one message from one side to the other.

    Attributes:
        fields: values by name, as the layout declares them.
        variant: name of this variant in the layout; "" if there is only one variant.
        scalars: the values of the layout's scalars in this direction.
    """

    fields: Mapping[str, Value]
    variant: str = ""
    scalars: Mapping[str, str] = field(default_factory=dict)
