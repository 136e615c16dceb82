"""Find plugins by name: a file in a package, or an entry point of another installed package.

| the name belongs to | result |
|---|---|
| a file in the package | that file: no other package can replace a part of FedVeil |
| an entry point of one package | the module that the entry point names, which defines the same names as such a file |
| entry points of two packages | refused, because the name is ambiguous |

Flower's bundle contains only FedVeil's own packages. A package that provides a plugin must be installed on every
machine that takes part in a run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import final

from fedveil.errors import ConfigError
from fedveil.sanitize import suggest_name


@final
@dataclass(frozen=True)
class PluginPackage:
    """A package whose files are found by name.

    Attributes:
        package: its import name: "fedveil.tasks".
        group: entry point group for other packages: "fedveil.tasks".
        key: the run config key named in error messages: "task.name".
        joint: separator between the words of a name; in a file name it is "_".
        needs: names that a module of another package must define.
    """

    package: str
    group: str
    key: str
    joint: str = "_"
    needs: tuple[str, ...] = ()

    def list_names(self) -> list[str]:
        """Return the names of all plugins: the package's files, and those that other packages provide."""
        return sorted({*self._own(), *(point.name for point in entry_points(group=self.group))})

    def load_module(self, name: str) -> ModuleType:
        """Return the module with that name.

        Raises:
            ConfigError: no package provides it, two do, or it cannot be imported.
        """
        if name in self._own():
            return importlib.import_module(f"{self.package}.{name.replace(self.joint, '_')}")
        if name not in self.list_names():
            raise ConfigError(
                f'{self.key}: found "{name}"; {suggest_name(name, self.list_names())}expected one of '
                f"{self.list_names()}; correct the name, or install the package that provides it on "
                "this machine: Flower's bundle contains only FedVeil's own plugins"
            )
        return load_entry_point(find_entry_point(self.group, name, self.key), self.key, self.needs)

    def _own(self) -> set[str]:
        """Return the names of the package's files."""
        path = importlib.import_module(self.package).__path__
        return {module.name.replace("_", self.joint) for module in pkgutil.iter_modules(path)}


def find_entry_point(group: str, name: str, key: str) -> EntryPoint:
    """Return the entry point with that group and name; error messages start with `key`.

    Raises:
        ConfigError: no package provides it, or two do.
    """
    points = list(entry_points(group=group, name=name))
    if len(points) != 1:
        packages = " and ".join(map(_package, points)) or "none"
        raise ConfigError(
            f'{key}: expected one package that provides "{name}", found {packages}; '
            f"{'uninstall all but one' if points else 'install one'}"
        )
    return points[0]


def load_entry_point(point: EntryPoint, key: str, needs: Sequence[str] = ()) -> ModuleType:
    """Import the module that an entry point names; it must define the names in `needs`.

    Raises:
        ConfigError: it does not load, is not a module, or lacks a name.
    """
    try:
        module = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'{key}: "{point.name}" of the package {_package(point)} does not load: {error}; '
            "fix or reinstall that package"
        ) from error
    if not isinstance(module, ModuleType) or any(not hasattr(module, name) for name in needs):
        raise ConfigError(
            f'{key}: "{point.name}" of the package {_package(point)} must be a '
            f"module{' with ' * bool(needs)}{' and '.join(needs)}, but is {module!r}; fix its entry point"
        )
    return module


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
