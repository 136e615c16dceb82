"""Parts that are found by their name: a file of a room, or what another installed package brings.

| name | found |
|---|---|
| of a file of the room | that file, whatever other packages say: no package can take the place of a part of FedVeil |
| of an entry point of one package | the module that the entry point names; it looks as a file of the room does |
| of entry points of two packages | refused: nothing says which of them is meant |

Flower's bundle carries FedVeil's own rooms alone. A package that brings a part must be installed on every machine of a
run.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import final

from fedveil.errors import ConfigError
from fedveil.foreign import meant


@final
@dataclass(frozen=True)
class Room:
    """A package whose files are found by name.

    Attributes:
        package: its import name: "fedveil.tasks".
        group: of the entry points of other packages: "fedveil.tasks".
        key: of the run config, for messages: "task.name".
        joint: between the words of a name; in the name of a file it is "_".
        needs: what a module of another package must define.
    """

    package: str
    group: str
    key: str
    joint: str = "_"
    needs: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """The names of all parts: the files of the room, and what other packages bring."""
        return sorted({*self._own(), *(point.name for point in entry_points(group=self.group))})

    def module(self, name: str) -> ModuleType:
        """The module of that name.

        Raises:
            ConfigError: there is none, two packages bring one, or the one that a package brings does not load.
        """
        if name in self._own():
            return importlib.import_module(f"{self.package}.{name.replace(self.joint, '_')}")
        found = list(entry_points(group=self.group, name=name))
        if not found:
            raise ConfigError(
                f'{self.key}: expected one of {self.names()}, found "{name}"; '
                f"{meant(name, self.names())}Correct the name, or install on this machine the package that brings it: "
                "Flower's bundle carries FedVeil's own parts alone"
            )
        if len(found) > 1:
            raise ConfigError(
                f'{self.key}: expected one package that brings "{name}", found {" and ".join(map(_package, found))}; '
                "uninstall all but one"
            )
        return self._loaded(found[0])

    def _own(self) -> set[str]:
        """Names of the files of the room."""
        path = importlib.import_module(self.package).__path__
        return {module.name.replace("_", self.joint) for module in pkgutil.iter_modules(path)}

    def _loaded(self, point: EntryPoint) -> ModuleType:
        try:
            module = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f'{self.key}: expected that "{point.name}" of the package {_package(point)} loads, found {error}; '
                "mend or reinstall that package"
            ) from error
        if not isinstance(module, ModuleType) or any(not hasattr(module, name) for name in self.needs):
            raise ConfigError(
                f'{self.key}: expected that "{point.name}" of the package {_package(point)} is a module'
                f"{' with ' * bool(self.needs)}{' and '.join(self.needs)}, found {module!r}; mend its entry point"
            )
        return module


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
