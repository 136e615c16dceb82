"""The entry points of a pyproject.toml for tests that run by PYTHONPATH, where no installation has them."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path


def provide_entry_points(project: Path) -> None:
    """Let this process and those that inherit its PYTHONPATH see the entry points that `project` declares.

    Where an installation of the same code has them, as after `make test`, nothing is done. Else a folder with the
    metadata of such an installation comes first on the path.
    """
    about = tomllib.loads(project.read_text())["project"]
    points = about["entry-points"] | {"console_scripts": about.get("scripts", {})}
    declared = {(group, name, value) for group, named in points.items() for name, value in named.items()}
    if declared <= _installed(about["name"]):
        return
    folder = Path(tempfile.mkdtemp(prefix="fedveil-entry-points-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_distribution(folder, about["name"], about["version"], points)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def _installed(name: str) -> set[tuple[str, str, str]]:
    try:
        return {(p.group, p.name, p.value) for p in importlib.metadata.distribution(name).entry_points}
    except importlib.metadata.PackageNotFoundError:
        return set()


def write_distribution(folder: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> None:
    """Write a distribution's metadata as pip would leave it; `points`: by group, an entry point's name and value."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items())
    (info / "entry_points.txt").write_text("".join(groups))
