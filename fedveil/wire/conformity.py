"""Checks that a message is what its layout declares. Every WireError names the field, the expected and the found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedveil.contract.layout import Direction, Layout
from fedveil.contract.method import REPORT_FIELDS
from fedveil.errors import WireError
from fedveil.wire.header import GREATEST, shown

_MAX_DIMENSION = 1 << 40


def check_names(layout: Layout, direction: Direction, variant: str, names: Any) -> None:
    """Raises WireError unless `names` are exactly the fields declared for this direction and variant."""
    if variant not in layout.variants(direction):
        raise WireError(f"variant: expected one of {layout.variants(direction)}, found {shown(variant)}")
    declared, found = layout.fields_of(direction, variant), list(names)
    if extra := [n for n in found if n not in declared]:
        raise WireError(f"{extra[0]}: expected no such field {direction} in variant {variant!r}, found it")
    if missing := [n for n in declared if n not in found]:
        raise WireError(f"{missing[0]}: expected this field {direction} in variant {variant!r}, found none")
    if len(found) != len(set(found)):
        raise WireError(f"fields: expected each name once, found {len(found)} entries of {len(set(found))} names")


def check_shape(name: str, declared: tuple[int | None, ...], found: tuple[int, ...]) -> None:
    """Raises WireError unless `found` is the declared shape, in which None stands for any length up to 2**40."""
    if (
        any(f > _MAX_DIMENSION for f in found)
        or len(found) != len(declared)
        or any(d is not None and d != f for d, f in zip(declared, found, strict=True))
    ):
        raise WireError(f"{name}: expected shape {declared}, found {found}")


def check_scalars(layout: Layout, direction: Direction, found: Mapping[str, Any]) -> None:
    """Raises WireError unless `found` has exactly the declared words, each with one of its choices."""
    declared = {word.name: word.choices for word in layout.scalars if word.direction == direction}
    if set(found) != set(declared):
        raise WireError(f"scalars: expected {sorted(declared)}, found {sorted(found)}")
    for name, value in found.items():
        if value not in declared[name]:
            raise WireError(f"scalar {name}: expected one of {declared[name]}, found {shown(value)}")


def check_report(report: Mapping[str, Any]) -> None:
    """Raises WireError unless all names are in REPORT_FIELDS and all values are numbers within +-2**53."""
    for name, value in report.items():
        if name not in REPORT_FIELDS:
            raise WireError(f"report {name}: expected one of {sorted(REPORT_FIELDS)}, found another")
        if type(value) not in (int, float) or not abs(value) <= GREATEST:
            raise WireError(f"report {name}: expected a finite number within +-{GREATEST}, found {shown(value)}")
