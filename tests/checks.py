"""Enforces annotations, types and shapes: conftest.py's import hook puts `checked` around the library's functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any, Protocol, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype

_jaxtyped = jaxtyping.jaxtyped
_NESTED: dict[tuple[str, CodeType], Any] = {}


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
        if isinstance(thing, type):
            return _check_class(typechecker, thing)
        is_plain = not any("[Tensor, " in str(a) for a in thing.__annotations__.values())
        if not is_plain or ("TYPE_CHECKING" in thing.__globals__ and not _has_no_shape(thing)):
            return _jaxtyped(typechecker=typechecker)(thing)  # also where beartype would refuse names it cannot find
        return _check_nested(typechecker, thing) if "<locals>" in thing.__qualname__ else typechecker(thing)

    return wrap


def _check_class(typechecker: Any, cls: Any) -> Any:
    has_fields = dataclasses.is_dataclass(cls) and "__init__" in vars(cls)
    if not has_fields or not _has_no_shape(cls.__init__):
        return _jaxtyped(typechecker=typechecker)(cls)
    cls.__init__ = typechecker(cls.__init__)
    return cls


def _has_no_shape(function: Any) -> bool:
    """Whether all annotations can be resolved, and none has a shape in it, be it through an alias."""
    try:
        return not any(map(_is_shaped, get_type_hints(function).values()))
    except (NameError, TypeError, AttributeError, SyntaxError):
        return False


def _is_shaped(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_is_shaped, get_args(hint)))


def _check_nested(typechecker: Any, function: FunctionType) -> Any:
    """The same for a function in a function, which is made anew in each call: to write its check takes a millisecond.

    So the check is written once for its code, and gets each function that has it.
    """
    key = function.__code__.co_filename, function.__code__
    if key not in _NESTED:
        bare = _without_closure(function)
        check = typechecker(bare)
        _NESTED[key] = None if check is bare else check  # beartype returns a function without annotations as it is
    first = _NESTED[key]
    if first is None:
        return function
    defaults = first.__kwdefaults__ or {}
    if "__beartype_func" not in defaults:
        raise AssertionError(f"beartype: expected __beartype_func among a check's defaults, found {sorted(defaults)}")
    made = FunctionType(first.__code__, first.__globals__, first.__name__, first.__defaults__, first.__closure__)
    made.__kwdefaults__ = defaults | {"__beartype_func": function}
    return functools.update_wrapper(made, function)


def _without_closure(function: FunctionType) -> FunctionType:
    """The same function without the values around it, which would stay as long as it does."""
    code = function.__code__
    cells = tuple(CellType() for _ in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    made.__dict__.pop("__wrapped__")
    return made


jaxtyping.jaxtyped = only_shapes
