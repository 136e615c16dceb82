"""`fedveil new`: writes a study to start from, with a model, a method and a task.

    fedveil new my-study

All of it runs as it is. The folder's README.md says how.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import random
import re
from pathlib import Path

from fedveil import paths
from fedveil.console.terminal import say
from fedveil.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_LONGEST_NAME = 40
_IN_PACKAGE = ("damped.py", "model.py", "vital_signs.py")
_MODULES = re.compile(r"^from (damped|vital_signs) import", re.MULTILINE)  # in the tests, as docs/extend shows them
_ROWS = {"north/train": 120, "south/train": 80, "server/test": 100}
_WARDS, _SIGNS = 3, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the new folder; its name becomes the package's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder."""
    folder = args.folder.expanduser()
    files = study_files(folder.name)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"FOLDER: expected a new folder, found one at {folder}; choose another name")
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    say(f"Wrote {len(files)} files to {folder}. To try them:")
    for line in (f"cd {folder}", "pip install --no-deps -e .", "python train.py run.toml"):
        say(f"    {line}")
    return 0


def study_files(name: str) -> dict[str, str]:
    """Return the text of each file of a study by its path in the folder.

    Args:
        name: the study's name; with underscores instead of hyphens, its package's.

    Raises:
        ConfigError: no package can have that name.
    """
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"FOLDER: expected a name of at most {_LONGEST_NAME} lower-case letters, digits and single hyphens that "
            f"begins with a letter, found {name!r}; choose another name"
        )
    if package in {"tests", "data"} or keyword.iskeyword(package) or importlib.util.find_spec(package):
        raise ConfigError(f"FOLDER: expected a name that no other module has, found {name!r}; choose another name")
    files = {f"{package}/__init__.py": f'"""{name}: a model, a method and a task for FedVeil."""\n'}
    for source in sorted(paths.find_folder("assets/study").glob("*.in")):
        file = source.stem
        folder = f"{package}/" if file in _IN_PACKAGE else "tests/" if file.startswith("test_") else ""
        text = source.read_text(encoding="utf-8").replace("{{package}}", package).replace("{{study}}", name)
        files[folder + file] = _MODULES.sub(rf"from {package}.\1 import", text)
    return files | {f"data/{place}.jsonl": _rows(place, count) for place, count in _ROWS.items()}


def _rows(place: str, count: int) -> str:
    """Return rows as lines of JSON: four random signs, and as ward the place of the largest of the first three."""
    draw, lines = random.Random(place), []
    for _ in range(count):
        signs = [round(draw.gauss(0, 1), 3) for _ in range(_SIGNS)]
        lines.append(json.dumps({"signs": signs, "ward": signs.index(max(signs[:_WARDS]))}))
    return "\n".join(lines) + "\n"
