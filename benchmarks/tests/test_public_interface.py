"""The benchmarks import only public names of FedVeil, so that another package's benchmark can do the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil_bench import folders
from tools.pages import python

PUBLIC = {name: set(python.public_names(name)) for name in python.modules()}


def private_imports(source: str) -> Iterator[str]:
    """Return what a program takes from FedVeil that is not public: modules, names, and attributes of modules."""
    tree, modules = ast.parse(source), {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if _is_ours(alias.name))  # only `from x import y` is followed
            case ast.ImportFrom(module=str(module), names=names) if _is_ours(module):
                for alias in names:
                    inner = f"{module}.{alias.name}"
                    if inner in PUBLIC:
                        modules[alias.asname or alias.name] = inner
                    elif alias.name not in PUBLIC.get(module, ()):
                        yield inner
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                if attribute not in PUBLIC[modules[name]]:
                    yield f"{modules[name]}.{attribute}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "fedveil"


def files() -> list[Path]:
    return sorted(folders.package_folder().rglob("*.py"))


@pytest.mark.parametrize("file", files(), ids=lambda file: file.relative_to(folders.package_folder()).as_posix())
def test_a_benchmark_imports_public_names_alone(file):
    assert list(private_imports(file.read_text())) == []


def test_every_file_is_looked_at():
    assert len(files()) > 80


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from fedveil.config import parse, RunConfig", []),
        ("from fedveil import strategies\nstrategies.create_method('fedavg')", []),
        ("from fedveil_bench import runner", []),
        ("from fedveil import paths", ["fedveil.paths"]),
        ("import fedveil.config", ["fedveil.config"]),
        ("from fedveil.config import nearest_key", ["fedveil.config.nearest_key"]),
        ("def f():\n    from fedveil.guard import clientapp", ["fedveil.guard.clientapp"]),
        ("from fedveil import strategies as s\ns._PLUGINS", ["fedveil.strategies._PLUGINS"]),
    ],
)
def test_what_is_not_public_is_found(source, found):
    assert list(private_imports(source)) == found
