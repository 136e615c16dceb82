"""The page of the interface in Python has every public class, function and field, with its signature and its words."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.conftest import ROOT
from tools import reference
from tools.pages import python

PAGE = reference.in_python()


def of_module(name: str) -> str:
    """The part of the page that a module has."""
    return re.split(r"^## ", PAGE.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def told(thing: object) -> str:
    """The first line of what it says of itself, as the page has it."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def public(space: dict[str, object], module: str) -> dict[str, object]:
    """What is defined there and has no underscore, as Python finds it: the page reads the source instead."""
    plain = {name: getattr(thing, "__func__", getattr(thing, "fget", thing)) for name, thing in space.items()}
    return {
        name: thing
        for name, thing in plain.items()
        if not name.startswith("_") and (inspect.isfunction(thing) or inspect.isclass(thing))
        if thing.__module__ == module
    }


@pytest.mark.parametrize("name", python.modules())
def test_every_public_class_and_function_is_there_with_its_parameters(name):
    part = of_module(name)
    found = public(vars(importlib.import_module(name)), name)
    assert re.findall(r"^### (\w+)$", part, re.M) == list(found)
    functions = {k: f for k, f in found.items() if inspect.isfunction(f)}
    for cls in (c for c in found.values() if inspect.isclass(c)):
        functions |= {f"{cls.__name__}.{k}": f for k, f in public(dict(vars(cls)), name).items()}
        assert told(cls) in part
    for function in functions.values():
        names = ".*".join(inspect.signature(function).parameters)
        assert re.search(rf"^def {function.__name__}\(.*{names}", part, re.M), function
        assert told(function), function
        assert told(function) in part


def test_the_way_in_and_the_whole_contract_are_there():
    in_contract = {f"fedveil.contract.{file.stem}" for file in (ROOT / "fedveil" / "contract").glob("[!_]*.py")}
    assert {"fedveil.local", "fedveil.federation.inprocess", *in_contract} == set(python.modules())
    assert set(re.findall(r"^## (\S+)$", PAGE, re.M)) == set(python.modules())


def test_fields_of_a_class_have_types_and_words():
    part = of_module("fedveil.local").partition("### Local")[2]
    assert "class Local:\n    config: RunConfig\n    method: Method\n" in part
    assert "*Attributes*\n\n- `config`: the run config, checked.\n" in part
    assert "*Raises*\n\n- `ConfigError`: a key or value" in part
    assert "_ELSEWHERE" not in PAGE
    assert "Weights = Mapping[str, Tensor]" in of_module("fedveil.contract.spec")


def test_the_contents_link_to_it():
    text = (ROOT / "docs" / "index.md").read_text()
    assert "](reference/python.md)" in text
    assert "\nreference/python\n" in text


def test_what_follows_arguments_becomes_a_list_and_no_sign_is_markup():
    words = "Args:\n    left, right: of (rows, *shape),\n        or `a[*]` <none>.\n\nReturns:\n    Both.\n\nEnds."
    items = "- `left, right`: of (rows, \\*shape),\n  or `a[*]` \\<none>."
    assert python.described(words) == f"*Args*\n\n{items}\n\n*Returns*\n\n  Both.\n\nEnds.\n"
