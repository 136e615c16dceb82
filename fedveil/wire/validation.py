"""Check a message against its layout. Every WireError names the field and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedveil.contract.layout import Direction, MessageLayout, WireField
from fedveil.contract.method import REPORT_FIELDS
from fedveil.errors import WireError
from fedveil.wire.header import GREATEST, PREFIX, printable_name, short_value

# Bytes in a header besides its fields and scalars: keys, numbers, method and layout names.
_FIXED_CHARACTERS = 1024
_NUMBER = 24  # maximum number of characters in a number in a header


@dataclass(frozen=True)
class MessageBounds:
    """Maximum sizes in bytes, for one direction: of a message, and of its uncompressed header."""

    message: int
    header: int


@lru_cache(maxsize=64)
def message_bounds(layout: MessageLayout, direction: Direction) -> MessageBounds:
    """Return the bounds that follow from the layout. No message may be larger, regardless of its header."""
    fields = [f for f in layout.fields if f.direction == direction]
    entries = sum(len(json.dumps([f.name, f.codec.name])) + _NUMBER * (len(f.shape) + 2) for f in fields)
    words = [word for word in layout.scalars if word.direction == direction]
    scalars = sum(len(json.dumps(word.name)) + max(map(len, word.choices)) for word in words)
    report = sum(len(name) + _NUMBER for name in REPORT_FIELDS)
    header = _FIXED_CHARACTERS + entries + scalars + report
    values = (
        sum(f.codec.nbytes(f.largest) + 8 for f in layout.fields_of(direction, variant).values())
        for variant in layout.variants(direction)
    )
    return MessageBounds(PREFIX + header + 8 + max(values), header)


def check_names(layout: MessageLayout, direction: Direction, variant: str, names: Any) -> None:
    """Raise WireError unless `names` are exactly the fields declared for this direction and variant."""
    if variant not in layout.variants(direction):
        raise WireError(f"variant: expected one of {layout.variants(direction)}, found {short_value(variant)}")
    declared, field_names = layout.fields_of(direction, variant), list(names)
    if extra := [n for n in field_names if n not in declared]:
        raise WireError(
            f"{printable_name(extra[0])}: there is no such field (direction {direction}, variant {variant!r})"
        )
    if missing := [n for n in declared if n not in field_names]:
        raise WireError(f"{missing[0]}: this field is missing (direction {direction}, variant {variant!r})")
    if len(field_names) != len(set(field_names)):
        raise WireError(
            f"fields: each name may occur once, but {len(field_names)} entries have {len(set(field_names))} names"
        )


def check_shape(field: WireField, found: tuple[int, ...]) -> None:
    """Raise WireError unless `found` is the declared shape, in which None stands for any length up to `most`."""
    if found == field.shape:
        return
    fits = len(found) == len(field.shape) and all(d in (None, f) for d, f in zip(field.shape, found, strict=True))
    if not fits or any(f > most for f, most in zip(found, field.largest, strict=True)):
        bound = f" of at most {field.most}" if None in field.shape else ""
        raise WireError(f"{field.name}: expected shape {field.shape}{bound}, found {found}")


def check_scalars(layout: MessageLayout, direction: Direction, found: Mapping[str, Any]) -> None:
    """Raise WireError unless `found` has exactly the declared scalars, each with one of its choices."""
    declared = {word.name: word.choices for word in layout.scalars if word.direction == direction}
    if set(found) != set(declared):
        raise WireError(f"scalars: expected {sorted(declared)}, found {sorted(found)}")
    for name, value in found.items():
        if value not in declared[name]:
            raise WireError(f"scalar {name}: expected one of {declared[name]}, found {short_value(value)}")


def check_report(report: Mapping[str, Any]) -> None:
    """Raise WireError unless all names are in REPORT_FIELDS and all values are numbers within +-2**53."""
    for name, value in report.items():
        if name not in REPORT_FIELDS:
            raise WireError(f"report {printable_name(name)}: unknown name; expected one of {sorted(REPORT_FIELDS)}")
        if type(value) not in (int, float) or not abs(value) <= GREATEST:
            raise WireError(f"report {name}: expected a finite number within +-{GREATEST}, found {short_value(value)}")
