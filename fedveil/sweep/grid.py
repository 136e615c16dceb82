"""The cells of a grid, one for every combination of run config values, and the seeds of each cell."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from fedveil.errors import ConfigError

__all__ = ["MAX_RUNS", "Cell", "Grid"]

MAX_RUNS = 1000
MAX_SEEDS = 100
_OWN = ("run.name", "run.dir", "run.resume", "run.seed")


@final
@dataclass(frozen=True)
class Cell:
    """One combination of values.

    Attributes:
        number: counts from 1, in grid order.
        values: the value of each key.
    """

    number: int
    values: Mapping[str, object]

    @property
    def label(self) -> str:
        """Return the values as text: "train.learning-rate=0.001"; "the config" for a grid without keys."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "the config"


@final
@dataclass(frozen=True)
class Grid:
    """Run config keys with their values, and the number of seeds (0, 1, ...).

    Attributes:
        values: at least one value for each key.
        seeds: runs per cell.
    """

    values: Mapping[str, Sequence[object]]
    seeds: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"--seeds: expected 1 to {MAX_SEEDS}, found {self.seeds}")
        for key, values in self.values.items():
            if key in _OWN:
                raise ConfigError(f"--grid: the sweep itself sets {key}, so a grid cannot vary it")
            if not values or len({repr(value) for value in values}) < len(values):
                raise ConfigError(f"--grid: the values of {key} must differ, found {list(values)}")
        if (count := self.seeds * math.prod(map(len, self.values.values()))) > MAX_RUNS:
            raise ConfigError(f"--grid: expected at most {MAX_RUNS} runs, found {count}; use fewer values or seeds")

    @classmethod
    def from_texts(cls, texts: Sequence[str], seeds: int = 1) -> Grid:
        """Read KEY=VALUE,VALUE; values with commas are written as a TOML list: KEY=["a, b", "c"].

        Raises:
            ConfigError: a text is not in this format, or repeats a key.
        """
        values: dict[str, Sequence[object]] = {}
        for text in texts:
            key, equals, listed = (part.strip() for part in text.partition("="))
            if not equals or not key or not listed or key in values:
                raise ConfigError(f"--grid: expected KEY=VALUE,VALUE, each key once, found {text!r}")
            values[key] = _values(listed)
        return cls(values, seeds)

    def cells(self) -> Iterator[Cell]:
        """Yield every combination; the last key changes fastest."""
        for number, values in enumerate(itertools.product(*self.values.values()), 1):
            yield Cell(number, dict(zip(self.values, values, strict=True)))


def _values(text: str) -> list[object]:
    if text.startswith("["):
        try:
            return list(tomllib.loads(f"value = {text}")["value"])
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"--grid: expected a TOML list, found {text!r} ({error})") from None
    return [_value(each.strip()) for each in text.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
