"""A missing wheel is named with its locked version, and can be carried with its hash."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tools import gpu, wheels

RANGES = wheels.promised(ROOT / "pyproject.toml")


def locked(name: str) -> str:
    text = (ROOT / "lock" / "run.txt").read_text() + (ROOT / "lock" / "test.txt").read_text()
    return re.search(rf"^{name}==(\S+)", text, re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("version", "asked", "holds"),
    [
        ("2.11.0a0+git1234", ">=2.11", True), ("2.11", ">=2.11", True), ("2.9.1", ">=2.11", False),
        ("1.39.0", ">=1.39,<1.40", True), ("1.40.0", ">=1.39,<1.40", False), ("2.55.1", "==2.55.1", True),
        ("1.39.0", "!=1.40.*", True), ("1.40.0", "!=1.40.*", False), ("1.40.3", ">=1.39,!=1.40.*", False),
        ("1.42.0", ">=1.39,<1.43,!=1.40.*", True), ("2.55.2", "==2.55.1", False),
        ("2.55.1.0", "==2.55.1", True), ("3.0", "", True),
    ],
)  # fmt: skip
def test_ranges_by_hand(version, asked, holds):
    assert wheels.within(version, asked) == holds


def test_every_range_of_pyproject_is_understood():
    assert RANGES["flwr"] == ">=1.39,<1.43,!=1.40.*"
    for name, asked in RANGES.items():
        assert not wheels.within("0", asked), name


def test_missing_and_old_distributions_are_named():
    versions = {"torch": "2.11.0+cu128", "peft": "0.20.0", "numpy": "2.3.1"}
    lacks = wheels.lacking(["torch", "peft", "numpy", "flwr"], RANGES, versions)
    assert lacks == {"peft": "0.20.0, expected >=0.21", "flwr": "missing"}


def test_what_is_here_as_the_lock_has_it_is_not_carried():
    every = wheels.to_carry(ROOT / "lock", RANGES, {})
    here = {wheels.canonical(name): version for name, version in (pin.split("==") for pin in every)}
    assert wheels.to_carry(ROOT / "lock", RANGES, here) == {}
    carried = wheels.to_carry(ROOT / "lock", RANGES, {n: v for n, v in here.items() if n not in ("flwr", "pytest")})
    assert list(carried) == [f"flwr=={locked('flwr')}", f"pytest=={locked('pytest')}"]
    assert all("--hash=sha256:" in block for block in every.values())
    assert not any(pin.startswith("torch==") for pin in every), "the machine has the build for its driver"


def test_every_need_of_a_part_is_in_pyproject_and_can_be_carried():
    carried = {wheels.canonical(pin.partition("==")[0]) for pin in wheels.to_carry(ROOT / "lock", RANGES, {})}
    for part in gpu.PARTS:
        assert set(part.needs) <= set(RANGES), part.name
        assert set(part.needs) - {"torch"} <= carried, part.name
