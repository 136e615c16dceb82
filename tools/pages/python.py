"""The public Python interface: the list PUBLIC_MODULES, and a page for each module.

A module's `__all__` is a hand-written list of its public names: other programs may import these, and the benchmarks
import no other names (benchmarks/tests/test_public_interface.py). Each class and function is shown with its signature
and docstring. Signatures come from the source: types appear by name, not by definition.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence

from fedveil.console.terminal import render_markdown

# Modules by their heading in the reference's index. "fedveil.contract.*" means every module in that package.
PUBLIC_MODULES: Mapping[str, tuple[str, ...]] = {
    "A federation in one process": (
        "fedveil.local", "fedveil.runs", "fedveil.sweep", "fedveil.config", "fedveil.errors", "fedveil.rng",
        "fedveil.federation.in_process", "fedveil.federation.exchange", "fedveil.resources",
    ),
    "What methods and tasks are written against": ("fedveil.contract.*",),
    "Methods, tasks and adapters": (
        "fedveil.strategies", "fedveil.strategies.*", "fedveil.tasks", "fedveil.tasks.*",
        "fedveil.adapters.all_weights", "fedveil.adapters.hadamard", "fedveil.adapters.lora",
        "fedveil.adapters.prefix", "fedveil.adapters.prompt", "fedveil.adapters.residual_lora",
    ),
    "Attacks": (
        "fedveil.attacks.base", "fedveil.attacks.statistics", "fedveil.attacks.samples",
        "fedveil.attacks.secagg_views", "fedveil.attacks.membership.*", "fedveil.attacks.reconstruction.*",
        "fedveil.attacks.model_extraction.*", "fedveil.attacks.sites.*", "fedveil.attacks.canaries.*",
        "fedveil.attacks.audit.controls", "fedveil.attacks.audit.runner",
    ),
    "Privacy, messages, data and records": (
        "fedveil.privacy.accounting", "fedveil.privacy.dp_sgd", "fedveil.privacy.guarantee_source",
        "fedveil.wire.capture", "fedveil.wire.envelope", "fedveil.wire.payloads", "fedveil.data.tables",
        "fedveil.data.split_files", "fedveil.data.partition", "fedveil.data.batches", "fedveil.data.images",
        "fedveil.data.image_decoding", "fedveil.training.text_metrics", "fedveil.training.per_example",
        "fedveil.training.unit_gradients", "fedveil.models.loading", "fedveil.models.clip",
        "fedveil.records.disclosure_ledger", "fedveil.records.audit_log", "fedveil.records.provenance",
    ),
    "Commands of other packages": ("fedveil.console.main", "fedveil.sanitize"),
    "For benchmarks of the system, not covered by compatibility": ("fedveil.testing.*",),
}  # fmt: skip
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ITEM = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)")
_SPECIAL = re.compile(r"[<*\[]")
_Defined = ast.ClassDef | ast.FunctionDef


def modules_by_heading() -> dict[str, list[str]]:
    """Return the import names of all public modules, by heading in the index."""
    return {
        heading: [name for pattern in patterns for name in _matching(pattern)]
        for heading, patterns in PUBLIC_MODULES.items()
    }


def modules() -> list[str]:
    """Return the import names of all public modules, in the order of the index."""
    return [name for names in modules_by_heading().values() for name in names]


def _matching(pattern: str) -> list[str]:
    if not pattern.endswith(".*"):
        return [pattern]
    package = importlib.import_module(pattern.removesuffix(".*"))
    return [found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.") if not found.ispkg]


def public_names(module: str) -> list[str]:
    """Return the names in a module's `__all__`, from its source; without it, the names of its classes and functions.

    So a third-party method or task can have a page without an `__all__`. Raises ValueError if there are no names.
    """
    body = _tree(module).body
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    if names := [name for name in defined if not name.startswith("_")]:
        return names
    raise ValueError(f"{module}: expected __all__ with the public names, found none; write it below the imports")


def summary(module: str) -> str:
    """Return the first line of a module's docstring."""
    return _plain((ast.get_docstring(_tree(module)) or "").partition("\n")[0])


def page(module: str) -> str:
    """Return a module's docstring, its types and constants, its classes and its functions."""
    names = public_names(module)
    parts = [f"# {module}\n", described(ast.get_docstring(_tree(module)) or "")]
    nodes = {name: _definition(module, name) for name in names}
    for title, is_one in (("Types that signatures name", _is_alias), ("Constants", _is_constant)):
        if lines := [_assignment(node) for node in nodes.values() if is_one(node)]:
            parts.append(f"{title}:\n\n" + _python("\n".join(lines)))
    for name, node in sorted(nodes.items(), key=lambda item: item[1].lineno):
        if isinstance(node, _Defined):
            parts += [f"## {name}\n", *_of(node)]
            if isinstance(node, ast.ClassDef):
                parts += [part for below in _public(node.body) for part in _of(below)]
    return "\n".join(parts)


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _definition(module: str, name: str) -> ast.stmt:
    """Return the statement that defines a name, following imports to the defining module."""
    body = _tree(module).body
    for_types = [node for one in body if isinstance(one, ast.If) for node in one.body]  # imports under TYPE_CHECKING
    for node in [*body, *for_types]:
        match node:
            case ast.ClassDef(name=given) | ast.FunctionDef(name=given) if given == name:
                return node
            case ast.Assign() | ast.AnnAssign() if name in _targets(node):
                return node
            case ast.ImportFrom(module=str(source)) if name in [alias.asname or alias.name for alias in node.names]:
                return _definition(source, name)
    raise ValueError(f"{module}: expected a definition of {name}, which is in its __all__, found none")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def described(docstring: str) -> str:
    """Return a docstring as Markdown: the content of `Args:` and similar sections becomes a list."""
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
    return render_markdown("\n".join(lines)) + "\n"


def _of(node: _Defined) -> Iterator[str]:
    yield _python(_class(node) if isinstance(node, ast.ClassDef) else _function(node))
    yield described(ast.get_docstring(node) or "")


def _public(body: Sequence[ast.stmt]) -> list[_Defined]:
    return [node for node in body if isinstance(node, _Defined) and not node.name.startswith("_")]


def _is_alias(node: ast.stmt) -> bool:
    """Return whether a statement defines a type alias such as `Weights = Mapping[str, Tensor]`, not a value."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    return bool(re.match(r"[A-Z][a-z]", node.targets[0].id))


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and not _is_alias(node)


def _assignment(node: ast.stmt) -> str:
    """Return an assignment's source, shortened if its value is long."""
    text = ast.unparse(node)
    return text if len(text) <= 120 else f"{text[:115]} ..."


def _class(node: ast.ClassDef) -> str:
    """Return a class without its methods and docstring: only its decorators, bases and public fields."""
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign | ast.Assign) and not ast.unparse(s).startswith("_")]
    bare = ast.ClassDef(node.name, node.bases, node.keywords, fields or [ast.Pass()], node.decorator_list)
    return ast.unparse(bare).removesuffix(":\n    pass")


def _function(node: ast.FunctionDef) -> str:
    """Return a signature with its decorators."""
    bare = ast.FunctionDef(node.name, node.args, [ast.Pass()], node.decorator_list, node.returns)
    return ast.unparse(ast.fix_missing_locations(bare)).removesuffix(":\n    pass")


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def _plain(text: str) -> str:
    """Escape text outside backticks so that Markdown renders it as plain text."""
    return "`".join(
        part if at % 2 else _SPECIAL.sub(lambda sign: f"\\{sign[0]}", part) for at, part in enumerate(text.split("`"))
    )
