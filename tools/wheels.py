"""Find the FedVeil requirements that an installation lacks, and say how to bring them to a machine without a network.

Names and ranges come from pyproject.toml, versions and hashes from lock/run.txt and lock/test.txt; there is no separate
list. torch is never copied, because a GPU machine already has the build for its driver. The script needs only Python.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.sbom import canonical

_LOCKS = ("run", "test")
_BLOCK = re.compile(r"^[A-Za-z0-9._-]+==.*\n(?:[ \t]+--hash=.*\n)*", re.MULTILINE)
_HOLDS = {
    ">=": lambda found, bound: found >= bound,
    "==": lambda found, bound: found == bound,
    "<": lambda found, bound: found < bound,
    "!=": lambda found, bound: found[: len(bound)] != bound,  # for "!=1.40.*"
}


def installed() -> dict[str, str]:
    """Return the installed versions, by canonical name; for a duplicate name, the first one that Python finds."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if distribution.name:  # a damaged installation has no name
            versions.setdefault(canonical(distribution.name), distribution.version)
    return versions


def promised(pyproject: Path) -> dict[str, str]:
    """Return the version range, such as ">=1.39,<1.40", for each distribution that the project or an extra requires."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    parts = [re.match(r"([A-Za-z0-9._-]+)\s*(.*)", line) for line in lines]
    return {canonical(part[1]): part[2] for part in parts if part}


def lacking(names: Iterable[str], ranges: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Return, by name, which of `names` are missing or out of range: "missing" or "0.20.0, expected >=0.21".

    Raises:
        KeyError: a name that pyproject.toml does not require.
    """
    lacks = {}
    for name in sorted(set(names)):
        asked = ranges[name]
        if name not in found:
            lacks[name] = "missing"
        elif not within(found[name], asked):
            lacks[name] = f"{found[name]}, expected {asked}"
    return lacks


def within(version: str, asked: str) -> bool:
    """Return whether a release is in the range; a vendor's build, such as "2.11.0a0+git", counts as 2.11.0."""
    for clause in filter(None, asked.replace(" ", "").split(",")):
        sign, bound = re.fullmatch(r"(>=|==|<|!=(?=.*\.\*$))([\d.]*\d)(?:\.\*)?", clause).groups()  # type: ignore[union-attr]
        if not _HOLDS[sign](_release(version), _release(bound)):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while len(parts) > 1 and parts[-1] == 0:  # 2.11 is 2.11.0
        parts.pop()
    return tuple(parts)


def to_carry(folder: Path, ranges: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Return the lock's blocks, with hashes, for all packages missing or out of range here, by "name==version"."""
    blocks = {}
    for lock in _LOCKS:
        for block in _BLOCK.findall((folder / f"{lock}.txt").read_text()):
            pin = re.split(r"[\s;\\]", block)[0]
            name = canonical(pin.partition("==")[0])
            if name not in found or not within(found[name], ranges.get(name, "")):
                blocks[pin] = block
    return blocks


def advice(file: Path, python: str) -> list[str]:
    """Return the steps to install the packages in `file`: two commands, one on each machine."""
    return [
        f"on a machine with a network and the same Python ({python}):",
        f"    python -m pip download --require-hashes --no-deps -r {file.name} -d wheels",
        f"here, with the folder wheels and {file}:",
        f"    python -m pip install --require-hashes --no-deps --no-build-isolation --no-index --find-links wheels "
        f"-r {file}",
    ]
