"""Parse a run config from the command line: a TOML file and KEY=VALUE pairs that override it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError


def parse_overrides(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the config by dotted key. Values that are not TOML become text; keys are unchecked. Raises ConfigError."""
    flat: dict[str, Any] = {}
    if file is not None:
        try:
            flat |= flatten_config(tomllib.loads(file.read_text("utf-8-sig")))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--config: expected a TOML file, found none at {file} ({error})") from None
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: expected KEY=VALUE, found {text!r}; write it as run.rounds=5")
        try:
            flat |= flatten_config({key.strip(): tomllib.loads(f"value = {value}")["value"]})
        except (tomllib.TOMLDecodeError, RecursionError):
            flat[key.strip()] = value.strip()
    return flat


def flatten_config(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys, such as {"train.epochs": 2}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
