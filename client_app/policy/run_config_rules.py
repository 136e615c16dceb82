"""The table [permits] in a site's policy: which run config keys may differ from their defaults, and how.

    [permits]
    "train.batch-size" = [8, 16]                   # one of these values
    "train.learning-rate" = {min = 1e-5, max = 1e-3}
    "method.params.rho" = 0.5                      # one method parameter
    "run.name" = {pattern = "pilot-[0-9]+"}        # the whole text must match

| case | result |
|---|---|
| a key in the table | its value must match |
| a key not in the table | its value must be the default in fedveil/config.py |
| a method parameter not in the table | it must not be set |
| a parameter that is a list | every value in it must match; an empty rule list matches only an empty list |
| a policy key that bounds a run config key (`methods`, `max-rounds`, ...) | counts as naming that key |
| true and 1, "1" and 1 | different values; 1 and 1.0 are equal |
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from fedveil.config import RunConfig, parse_toml, renamed
from fedveil.errors import PolicyError
from fedveil.sanitize import suggest_name

Value = bool | int | float | str
_FIELDS, _RESUME = "method.params", "run.resume"
_LONGEST_TEXT = 1000  # maximum length of a text that a pattern is matched against
_SHOWN = 80


class AllowedRange(BaseModel):
    """Numbers from `min` to `max`, inclusive."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min: int | float | None = None
    max: int | float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> AllowedRange:
        if self.min is None and self.max is None:
            raise ValueError("expected min, max or both")
        return self


class AllowedPattern(BaseModel):
    """Texts that match a regular expression as a whole."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"expected a regular expression ({error})") from None
        return text


Permit = Value | list[Value] | AllowedRange | AllowedPattern


def flatten_permits(table: object) -> object:
    """Return the table with full keys, because TOML reads `train.epochs = 2` as a nested table. Raises ValueError."""
    if not isinstance(table, Mapping):
        return table
    permits = _flat(table, lambda value: set(value) <= {"min", "max"} or set(value) == {"pattern"})
    known = set(RunConfig().flat()) - {_FIELDS}
    for key in permits:
        if new := renamed(key):
            raise ValueError(f"{key[:80]} in [permits]: this is the key's old name; write {new}")
        if key not in known and not key.startswith(f"{_FIELDS}."):
            near = suggest_name(key, known)
            raise ValueError(f"unknown key {key[:80]} in [permits]; {near}expected a run config key, or {_FIELDS}.NAME")
    return permits


def check_run_config(permits: Mapping[str, Permit], named: Collection[str], config: RunConfig) -> None:
    """Raise PolicyError for the first key with a forbidden value. `named`: the keys that the policy itself bounds."""
    defaults = RunConfig().flat()
    for key, value in _asked(config).items():
        if key in permits:
            if not _fits(value, permits[key]):
                raise _refused(key, _words(permits[key]), value)
        elif key not in named and not (key in defaults and _same(value, defaults[key])):
            raise _refused(key, repr(defaults[key]) if key in defaults else "it unset", value)


def permits_for_run(config: RunConfig) -> str:
    """Return a TOML table that permits only this run, and resuming it from the run folder's resume.toml.

    A comment above the table names the policy's other keys that a run always needs.
    Permitting `run.resume` gives a server no advantage: sites ignore it, and a lying server could resume with it false.
    """
    defaults = RunConfig().flat()
    permits = {k: v for k, v in _asked(config).items() if not (k in defaults and _same(v, defaults[k]))}
    permits[_RESUME] = [False, True]
    lists = {"methods": config.method.name, "tasks": config.task.name, "models": config.task.model}
    needed = ", ".join(f"{key} = [{_toml(value)}]" for key, value in lists.items())
    if config.task.module:
        needed += f", modules with the SHA-256 of {config.task.module}.py"
    comment = f"# above this table, the policy needs {needed}, and app-digests (`fedveil app digest`) or signers"
    return "\n".join([comment, "[permits]", *(f"{_toml(key)} = {_toml(value)}" for key, value in permits.items())])


def _asked(config: RunConfig) -> dict[str, Any]:
    """Return every run config key, with the method parameters as separate keys."""
    flat: dict[str, Any] = config.flat()
    fields = parse_toml(str(flat.pop(_FIELDS)), _FIELDS)
    return flat | _flat(fields, lambda value: not value, f"{_FIELDS}.")


def _flat(table: Mapping[str, Any], is_value: Any, prefix: str = "") -> dict[str, Any]:
    flat_table: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping) and not is_value(value)
        flat_table |= _flat(value, is_value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat_table


def _fits(value: object, permit: Permit) -> bool:
    if isinstance(value, list):
        return all(_fits(one, permit) for one in value) if value else permit == []
    if isinstance(permit, AllowedRange):
        low = permit.min if permit.min is not None else float("-inf")
        high = permit.max if permit.max is not None else float("inf")
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if isinstance(permit, AllowedPattern):
        fits = isinstance(value, str) and len(value) <= _LONGEST_TEXT and re.fullmatch(permit.pattern, value)
        return fits is not None and fits is not False
    return any(_same(value, one) for one in (permit if isinstance(permit, list) else [permit]))


def _same(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _words(permit: Permit) -> str:
    return (
        repr(permit.model_dump(exclude_none=True))
        if isinstance(permit, AllowedRange | AllowedPattern)
        else repr(permit)
    )


def _refused(key: str, permitted: str, value: object) -> PolicyError:
    return PolicyError(
        f"{key[:_SHOWN]}: this site permits {permitted}, found {repr(value)[:_SHOWN]}; `fedveil explain --permits` "
        "prints what the site would have to permit"
    )


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
