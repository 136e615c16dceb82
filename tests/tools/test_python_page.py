"""The Python interface page has every public class, function and field, with signature and description."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.conftest import ROOT
from tests.tools.all_pages import all_pages
from tools.pages import python


def page_of(name: str) -> str:
    return all_pages()[f"reference/python/{name}.md"]


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


def _is_own_class(name: str, thing: object) -> bool:
    """Whether it is a class and no second name of one, which is shown as an assignment."""
    return inspect.isclass(thing) and thing.__name__ == name


@pytest.mark.parametrize("name", python.modules())
def test_every_public_name_is_there_with_its_parameters(name):
    module, page = importlib.import_module(name), page_of(name)
    assert python.public_names(name) == list(getattr(module, "__all__", python.public_names(name)))
    found = {key: getattr(module, key) for key in python.public_names(name)}
    found = {key: inspect.unwrap(thing) if callable(thing) else thing for key, thing in found.items()}  # of a cache
    shown = {key for key, thing in found.items() if inspect.isfunction(thing) or _is_own_class(key, thing)}
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == shown
    assert {key for key in set(found) - shown if not re.search(rf"\b{key}\b.* = |\b{key}: ", page)} == set()
    functions = {key: found[key] for key in shown if inspect.isfunction(found[key])}
    for cls in (found[key] for key in shown if inspect.isclass(found[key])):
        below = public(dict(vars(cls)), cls.__module__)
        functions |= {f"{cls.__name__}.{k}": f for k, f in below.items() if inspect.isfunction(f) and f.__name__ == k}
        assert python.described(told(cls)).strip() in page
    for function in functions.values():
        names = ".*".join(inspect.signature(function).parameters)
        assert re.search(rf"^def {function.__name__}\(.*{names}", page, re.M), function


def test_the_way_in_the_whole_contract_and_every_method_are_there():
    files = {
        "fedveil.contract": "fedveil/contract",
        "fedveil.strategies": "strategies",
        "fedveil.tasks": "fedveil/tasks",
    }
    for package, folder in files.items():
        inside = {f"{package}.{file.stem}" for file in (ROOT / folder).glob("[!_]*.py")}
        assert inside <= set(python.modules())
    assert "fedveil.local" in python.modules()
    assert len(python.modules()) == len(set(python.modules()))
    index = all_pages()["reference/python/index.md"]
    assert set(re.findall(r"^\| \[`(\S+)`\]\(\1\.md\) \| .+ \|$", index, re.M)) == set(python.modules())


def test_a_module_without_a_list_has_its_definitions_and_an_empty_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unlisted_module.py").write_text("def load(): ...\ndef _hide(): ...\n")
    (tmp_path / "empty_module.py").write_text("_NONE = 1\n")
    (tmp_path / "overlisted_module.py").write_text("__all__ = ['store']\n")
    assert python.public_names("unlisted_module") == ["load"]
    with pytest.raises(ValueError, match="empty_module: expected __all__ with the public names, found none"):
        python.page("empty_module")
    with pytest.raises(ValueError, match="overlisted_module: expected a definition of store"):
        python.page("overlisted_module")


def test_a_name_that_a_module_hands_on_is_shown_as_it_is_defined():
    page = page_of("fedveil.testing.deployment")
    assert "## LocalDeployment" in page
    assert "starts on entry and stops on exit" in page


def test_fields_of_a_class_have_types_and_words():
    part = page_of("fedveil.local")
    assert "class LocalFederation:\n    config: RunConfig\n    method: Method\n" in part
    assert "*Attributes*\n\n- `config`: the validated run config.\n" in part
    assert "*Raises*\n\n- `ConfigError`: a key or value" in part
    assert "_ELSEWHERE" not in part
    assert "Weights = Mapping[str, Tensor]" in page_of("fedveil.contract.param_spec")


def test_the_contents_link_to_it():
    text = (ROOT / "docs" / "index.md").read_text()
    assert "](reference/python/index.md)" in text
    assert "\nreference/python/index\n" in text


def test_what_follows_arguments_becomes_a_list_and_no_sign_is_markup():
    words = "Args:\n    left, right: of (rows, *shape),\n        or `a[*]` <none>.\n\nReturns:\n    Both.\n\nEnds."
    items = "- `left, right`: of (rows, \\*shape),\n  or `a[*]` \\<none>."
    assert python.described(words) == f"*Args*\n\n{items}\n\n*Returns*\n\n  Both.\n\nEnds.\n"
