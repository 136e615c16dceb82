"""Tables of all attacks: those that an audit runs, with their controls, and the other files in the attack packages."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from fedveil.attacks import base
from fedveil.attacks.base import AuditAttack, UploadAttack
from tools.pages import lines


def audited() -> list[tuple[str, ...]]:
    """Return a row for each attack that `fedveil audit` finds: file, title, input, controls, lines of code."""
    return [(f"`{_file(type(a).__module__)}`", *_of(a), _counted(type(a).__module__)) for a in base.list_attacks()]


def others() -> list[tuple[str, ...]]:
    """Return a row for each other file in the packages: attacks that only benchmarks use, and shared code."""
    known = {type(attack).__module__ for attack in base.list_attacks()}
    return [
        (f"`{_file(module.__name__)}`", title(module), _counted(module.__name__))
        for module in _modules()
        if module.__name__ not in known
    ]


def title(module: ModuleType) -> str:
    """Return the first line of a module's docstring, without its period."""
    return (inspect.getdoc(module) or "").partition("\n")[0].rstrip(".")


def _modules() -> Iterator[ModuleType]:
    package = importlib.import_module("fedveil.attacks")
    for module_info in pkgutil.walk_packages(package.__path__, "fedveil.attacks."):
        if module_info.name.count(".") == 3 and not module_info.name.startswith(
            "fedveil.attacks.audit."
        ):  # attack modules only
            yield importlib.import_module(module_info.name)


def _of(attack: AuditAttack) -> tuple[str, ...]:
    reads = f"uploads of {', '.join(sorted(attack.reads))}" if isinstance(attack, UploadAttack) else "a model's answers"
    return title(importlib.import_module(type(attack).__module__)), reads, attack.must_win, ", ".join(attack.must_lose)


def _file(module: str) -> str:
    return module.removeprefix("fedveil.").replace(".", "/") + ".py"


def _counted(module: str) -> str:
    source = importlib.import_module(module).__file__
    assert source is not None
    return str(lines.of_file(Path(source)))
