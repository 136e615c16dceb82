"""One file per method, with its client and server algorithms and no Flower code. Each method is named after its file.

Other packages register their methods' modules under the entry-point group "fedveil.methods".
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fedveil.config import parse_toml
from fedveil.errors import ConfigError
from fedveil.plugins import PluginPackage
from fedveil.sanitize import sanitize, suggest_name

if TYPE_CHECKING:  # imports torch, which listing names does not need
    from fedveil.contract.method import Method

__all__ = ["create_from_json", "create_method", "list_methods", "load_method"]

_PLUGINS = PluginPackage("fedveil.strategies", "fedveil.methods", "method.name")
_ADAPTER = "adapter"


def list_methods() -> list[str]:
    """Return the names of all methods, from the files in this folder and from other packages."""
    return _PLUGINS.list_names()


def load_method(name: str) -> type[Method]:
    """Return the method's class, the only Method that the module of that name defines.

    Raises:
        ConfigError: no method has that name, or the module does not define exactly one method.
    """
    from fedveil.contract.method import Method

    module = _PLUGINS.load_module(name)
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    methods = [c for c in classes if issubclass(c, Method)]
    if len(methods) != 1:
        raise ConfigError(
            f'method.name: the module {module.__name__} of "{name}" must define exactly one Method, but defines '
            f"{len(methods)}; move helper classes to another module"
        )
    return methods[0]


def create_method(name: str, fields: str = "") -> Method:
    """Create the method `name` with its hyperparameters from TOML text ("rho = 0.3").

    Raises:
        ConfigError: a field is unknown or its value is out of range; the message names the field.
    """
    return _validated(name, parse_toml(fields, "method.params"))


def create_from_json(name: str, fields: str) -> Method:
    """Create the method that the server describes to a client from JSON of all its fields. Raises ConfigError."""
    return _validated(name, json.loads(fields))


def _validated(name: str, fields: dict[str, Any]) -> Method:
    cls = load_method(name)
    if isinstance(given := fields.get(_ADAPTER), dict):
        fields = {**fields, _ADAPTER: _adapter(cls, given)}
    method: Method = _parsed(cls, name, fields)
    return method


def _adapter(cls: type[Method], given: dict[str, Any]) -> Any:
    """Create the adapter from its table: the named kind, or the method's only kind. Raises ConfigError."""
    hint = typing.get_type_hints(cls).get(_ADAPTER)
    if hint is None or not (choice := typing.get_args(hint)):
        return given if hint is None else _parsed(hint, f"the adapter of {cls.__name__}", given, _ADAPTER)
    kinds = {each.kind: each for each in choice}
    default = next(own.default_factory for own in dataclasses.fields(cls) if own.name == _ADAPTER)  # type: ignore[arg-type]
    kind = given.get("kind", choice[0].kind if default is dataclasses.MISSING else default().kind)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(
            f"method.params: {_ADAPTER}.kind: found {sanitize(kind, 80)!r}; {suggest_name(str(kind), kinds)}"
            f"expected one of {sorted(kinds)}"
        )
    return _parsed(kinds[kind], f"the adapter {kind}", given, _ADAPTER)


def _parsed(cls: Any, name: str, fields: Any, *within: str) -> Any:
    try:
        return TypeAdapter(cls).validate_python(fields)
    except ConfigError as error:  # from a method's own check
        raise ConfigError(f"method.params: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, (*within, *first["loc"])))
        if first["type"] == "unexpected_keyword_argument":
            known = [f.name for f in dataclasses.fields(cls)]
            near = suggest_name(path.rpartition(".")[2], known)
            raise ConfigError(
                f"method.params: {sanitize(path, 80)}: unknown field of {name}; {near}expected one of {known}"
            ) from None
        raise ConfigError(f"method.params: {path}: {first['msg']}, found {first['input']!r}") from None
