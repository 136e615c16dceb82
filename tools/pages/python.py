"""The public interface in Python: each class and function of a module, as it is written and as it says of itself.

A name that begins with an underscore is not public, nor is one that a module only imports. Signatures are read off the
source: a type is shown by its name, not by what it stands for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence

from fedveil.console.terminal import markdown

ENTRIES = ("fedveil.local", "fedveil.federation.inprocess")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ITEM = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)")
_SPECIAL = re.compile(r"[<*\[]")
_Defined = ast.ClassDef | ast.FunctionDef


def modules() -> list[str]:
    """What the page describes: the ways in, and every module of the contract."""
    package = importlib.import_module("fedveil.contract")
    return [*ENTRIES, *(found.name for found in pkgutil.iter_modules(package.__path__, "fedveil.contract."))]


def module(name: str) -> str:
    """A module's own words, the short names of its types, its classes and its functions."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    parts = [f"## {name}\n", described(ast.get_docstring(tree) or "")]
    if aliases := [ast.unparse(node) for node in tree.body if _is_alias(node)]:
        parts.append("Types that signatures name:\n\n" + _python("\n".join(aliases)))
    for node in _public(tree.body):
        parts += [f"### {node.name}\n", *_of(node)]
        if isinstance(node, ast.ClassDef):
            parts += [part for below in _public(node.body) for part in _of(below)]
    return "\n".join(parts)


def described(docstring: str) -> str:
    """A docstring as Markdown: what `Args:` and its like hold becomes a list."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if begins := _SECTION.match(line):
            section = begins[1]
            lines += [f"*{section}*", ""]
        elif section and line.startswith("    "):
            item = _ITEM.match(line)
            lines.append(f"- `{item[1]}`: {_plain(item[2])}" if item else f"  {_plain(line.strip())}")
        else:
            section = "" if line else section
            lines.append(line if line.startswith("    ") else _plain(line))
    return markdown("\n".join(lines)) + "\n"


def _of(node: _Defined) -> Iterator[str]:
    yield _python(_class(node) if isinstance(node, ast.ClassDef) else _function(node))
    yield described(ast.get_docstring(node) or "")


def _public(body: Sequence[ast.stmt]) -> list[_Defined]:
    return [node for node in body if isinstance(node, _Defined) and not node.name.startswith("_")]


def _is_alias(node: ast.stmt) -> bool:
    """Whether a statement gives a type a second name: `Weights = Mapping[str, Tensor]`, and no value."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    return bool(re.match(r"[A-Z][a-z]", node.targets[0].id)) and isinstance(node.value, ast.Subscript | ast.BinOp)


def _class(node: ast.ClassDef) -> str:
    """A class without its methods and docstring: decorators, bases, public fields."""
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign | ast.Assign) and not ast.unparse(s).startswith("_")]
    bare = ast.ClassDef(node.name, node.bases, node.keywords, fields or [ast.Pass()], node.decorator_list)
    return ast.unparse(bare).removesuffix(":\n    pass")


def _function(node: ast.FunctionDef) -> str:
    """A signature with its decorators."""
    bare = ast.FunctionDef(node.name, node.args, [ast.Pass()], node.decorator_list, node.returns)
    return ast.unparse(ast.fix_missing_locations(bare)).removesuffix(":\n    pass")


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def _plain(text: str) -> str:
    """Text outside backticks, of which Markdown reads nothing else than a text."""
    return "`".join(
        part if at % 2 else _SPECIAL.sub(lambda sign: f"\\{sign[0]}", part) for at, part in enumerate(text.split("`"))
    )
