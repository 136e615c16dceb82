"""Enforces annotations, types and shapes: conftest.py's import hook puts `checked` around the library's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

_jaxtyped = jaxtyping.jaxtyped


def checked(function: Any, *_: Any, **__: Any) -> Any:
    """The function with its annotations enforced by beartype.

    Protocols are not: on Python 3.11 such a check reads every property of the object, and some raise on purpose.
    """
    return beartype(function, conf=_without(*Protocol.__subclasses__()))  # type: ignore[attr-defined]


@cache
def _without(*protocols: Any) -> BeartypeConf:
    return BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict(dict.fromkeys(protocols, object)))


def only_shapes(typechecker: Any) -> Callable[[Any], Any]:
    """Stands for `jaxtyping.jaxtyped`, which costs 20 us a call: so it is kept for signatures with a shape."""

    def wrap(thing: Any) -> Any:
        if thing.__module__ == "fedveil.ops.triton_kernels":  # Triton compiles a function, not what is around it
            return thing
        plain = not isinstance(thing, type) and not any("[Tensor, " in str(a) for a in thing.__annotations__.values())
        if plain and "TYPE_CHECKING" not in thing.__globals__:  # beartype by itself refuses names it cannot find
            return typechecker(thing)
        return _jaxtyped(typechecker=typechecker)(thing)

    return wrap


jaxtyping.jaxtyped = only_shapes
