"""The `fedveil` commands: files under `commands/`, and modules of installed packages.

| command attribute | for a file under `commands/` | for another package |
|---|---|---|
| name | the file name | the name of its entry point in the `fedveil.commands` group |
| group in `fedveil --help` | the folder name | `COMMAND_GROUP = "site"` in the module, or "from other packages" |

A module from another package has `add_arguments` and a command docstring, as described in fedveil/console/main.py.
FedVeil's own files come first, so no package can replace a FedVeil command. Only the chosen command is imported; the
other commands' summaries are read from their source code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from fedveil import paths, plugins

ENTRY_POINTS = "fedveil.commands"
OTHER_GROUP = "from other packages"


@dataclass(frozen=True)
class CommandSource:
    """A command's location: its module, not yet imported.

    Attributes:
        module: its import name.
        group: its group in `fedveil --help`.
        summary: a one-line description.
        is_own: true for a file under `commands/`.
    """

    name: str
    module: str
    group: str
    summary: str
    is_own: bool

    def load(self) -> ModuleType:
        """Import the command's module.

        Raises:
            ConfigError: two packages provide a command with this name, or the package's command fails to load.
        """
        if self.is_own:
            return importlib.import_module(self.module)
        point = plugins.find_entry_point(ENTRY_POINTS, self.name, "command")
        return plugins.load_entry_point(point, "command", ("add_arguments",))


def list_commands() -> dict[str, CommandSource]:
    """Return all commands by name."""
    own = {name: _own_command(file) for name, file in _own_files().items()}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        if point.name not in own:
            own[point.name] = _installed_command(point.name, point.module)
    return own


def find_command(name: str) -> CommandSource | None:
    """Return the command with that name, or None."""
    if file := _own_files().get(name):  # without searching every installed package
        return _own_command(file)
    return list_commands().get(name)


def _own_files() -> dict[str, Path]:
    files = paths.find_folder("console/commands").glob("*/*.py")
    return {file.stem: file for file in sorted(files) if file.stem != "__init__"}


def _own_command(file: Path) -> CommandSource:
    group = file.parent.name
    module, tree = f"fedveil.console.commands.{group}.{file.stem}", ast.parse(file.read_text(encoding="utf-8"))
    return CommandSource(file.stem, module, group, _summary(tree), True)


def _installed_command(name: str, module: str) -> CommandSource:
    try:
        spec = importlib.util.find_spec(module)  # imports the parent packages, not the module
    except ImportError:
        spec = None
    if spec is None or not spec.origin:
        return CommandSource(name, module, OTHER_GROUP, f"cannot be loaded: no module {module}", False)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return CommandSource(name, module, _group(tree), _summary(tree), False)


def _group(tree: ast.Module) -> str:
    """Return the value of `COMMAND_GROUP = "..."`."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="COMMAND_GROUP")], value=ast.Constant(value=str(group))):
                return group
    return OTHER_GROUP


def _summary(tree: ast.Module) -> str:
    """Return the docstring's first line without the command name: "`fedveil x`: does this." gives "does this"."""
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    return first.partition(": ")[2].rstrip(".") or first
