"""The methods, one file each: both halves of its maths, and no Flower. A method is found by its file name."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedveil.config import parse_toml
from fedveil.contract.method import Method
from fedveil.errors import ConfigError


def names() -> list[str]:
    """Names of all methods: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(name: str) -> type[Method]:
    """The method's class: the one Method that the module `fedveil.strategies.<name>` defines.

    Raises:
        ConfigError: there is no file of that name.
    """
    if name not in names():
        raise ConfigError(f'method.name: expected one of {names()}, found "{name}"')
    module = importlib.import_module(f"fedveil.strategies.{name}")
    found = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    (method,) = [c for c in found if issubclass(c, Method)]
    return method


def create(name: str, fields: str = "") -> Method:
    """The method `name` with its hyper-parameters from TOML text ("rho = 0.3").

    Raises:
        ConfigError: a field is unknown or its value is out of range; the message names the field.
    """
    return _validated(name, parse_toml(fields, "method.fields"))


def create_from_json(name: str, fields: str) -> Method:
    """The method that a server describes to a client, with every field as JSON. Raises ConfigError."""
    return _validated(name, json.loads(fields))


def _validated(name: str, fields: dict[str, Any]) -> Method:
    method: Method = _parsed(load(name), name, fields)
    return method


def _parsed(cls: Any, name: str, fields: Any, *within: str) -> Any:
    try:
        return TypeAdapter(cls).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, (*within, *first["loc"])))
        if first["type"] == "unexpected_keyword_argument":
            known = [f.name for f in dataclasses.fields(cls)]
            raise ConfigError(f"method.fields: {path}: unknown field of {name}; expected one of {known}") from None
        raise ConfigError(f"method.fields: {path}: {first['msg']}, found {first['input']!r}") from None
