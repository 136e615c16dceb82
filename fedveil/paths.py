"""Locations of this installation's files: in a wheel, in a checkout, or in the bundle that Flower installed.

| file | in a wheel | in a checkout | in a bundle |
|---|---|---|---|
| `strategies`, `server_app`, `client_app`, `attacks` | in `fedveil/` | at the top, linked in `fedveil/` | at the top |
| `data` | `fedveil/demo_data` | at the top, linked as `fedveil/demo_data` | missing |
| pyproject.toml, constraints.txt, lock, LICENSE | `fedveil/checkout` | at the top, linked in there | at the top |

The package's path has one folder, except in a bundle and in an archive that was unpacked without links
(fedveil/__init__.py).

No other module guesses a folder from `__file__`. This module imports neither torch nor Flower. It also creates the
folders for private files.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import fedveil
from fedveil.errors import ConfigError

LINKS = ("attacks", "client_app", "server_app", "strategies")  # folders at the top, linked in the package
# The contents of Flower's bundle: fedveil's modules and these packages in it, the apps and the methods.
# A test compares them with fab-include in pyproject.toml.
APP_PACKAGES = (
    "adapters", "cards", "contract", "data", "federation", "models", "ops", "own", "privacy", "records", "tasks",
    "training", "wire",
)  # fmt: skip
APP_LINKS = ("client_app", "server_app", "strategies")
_DATA = "demo_data"  # the name of `data` inside the package
# Folders at the top of a checkout that no FedVeil build needs. This applies only at the top, because a package also has
# a folder `runs`.
_NO_SOURCE = ("benchmarks", "build", "dist", "*.egg-info", ".*", "runs")
_BESIDE = "checkout"  # the folder inside the package for the files that a checkout has next to the package


def package_folder() -> Path:
    """Return the folder of the running package `fedveil`."""
    return Path(fedveil.__path__[0]).absolute()


def import_root() -> Path:
    """Return the folder that must be on Python's path to import the running code."""
    return package_folder().parent


def checkout_folder() -> Path | None:
    """Return the folder of the running checkout or bundle; None in a wheel."""
    return (
        import_root()
        if (import_root() / "pyproject.toml").is_file() and (import_root() / "strategies").is_dir()
        else None
    )


def find_folder(name: str) -> Path:
    """Return a folder of this installation: "data/e2e", "docs/pictures". Raises ConfigError if it is missing."""
    top, _, rest = name.partition("/")
    inside = package_folder() / (_DATA if top == "data" else top) / rest
    for place in (inside, import_root() / name):
        if place.is_dir():
            return place
    raise ConfigError(
        f"installation: the folder {name} is missing in {package_folder()} and next to it; reinstall fedveil"
    )


def find_file(name: str) -> Path:
    """Return the path of pyproject.toml, constraints.txt or LICENSE. Raises ConfigError if it is missing."""
    for place in (checkout_folder(), package_folder() / _BESIDE):
        if place and (place / name).is_file():
            return place / name
    raise ConfigError(
        f"installation: {name} is missing in {package_folder()}; install fedveil from a wheel or a checkout"
    )


def private_folder(path: Path) -> Path:
    """Create `path` and its missing parents, readable only by their owner, and return it.

    Raises:
        OSError: it cannot be created, or is a file; the error names the path.
    """
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)  # not with parents=True, which gives parents the default mode
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def find_other_writer(file: Path, about: os.stat_result) -> str:
    """Return who besides this user and root can change or replace a file, and the remedy; "" if no one can.

    The owner and mode of the file and of its folder decide, as ssh does for its files. On a read-only mount only the
    file is checked: no process can replace files there, and Kubernetes gives such folders every permission.

    Args:
        about: metadata of the opened file.

    Raises:
        OSError: the folder's metadata cannot be read.
    """
    is_fixed = os.statvfs(file).f_flag & os.ST_RDONLY
    folders = set() if is_fixed else {file.absolute().parent, file.resolve().parent}  # a link has two folders
    for path, status in [(file, about), *((folder, folder.stat()) for folder in sorted(folders))]:
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}; chown it to the user who runs this"
        if (mode := stat.S_IMODE(status.st_mode)) & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} has mode {mode:o}, so its group or other users may write to it; chmod go-w {path}"
    return ""


def copy_checkout(target: Path, source: Path | None = None) -> Path:
    """Copy `source`, or this installation laid out as a checkout, to the new folder `target`, as a build directory."""
    compiled = shutil.ignore_patterns("__pycache__")
    if at := source or checkout_folder():
        top = shutil.ignore_patterns(*_NO_SOURCE)
        shutil.copytree(
            at,
            target,
            symlinks=True,
            ignore=lambda f, names: {*compiled(f, names), *(top(f, names) if Path(f) == at else ())},
        )
        return target
    shutil.copytree(package_folder() / _BESIDE, target, ignore=compiled)
    shutil.copytree(package_folder(), target / "fedveil", ignore=compiled)
    for file in (target / "fedveil" / _BESIDE).iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        file.symlink_to(Path("../..") / file.name)
    for name in (*LINKS, _DATA):
        inside, top_name = target / "fedveil" / name, "data" if name == _DATA else name
        inside.rename(target / top_name)
        inside.symlink_to(Path("..") / top_name)
    return target


def app_sources(at: Path | None = None) -> dict[str, Path]:
    """Return the app's Python files by name in the bundle, sorted. `at`: where to look; default `import_root()`."""
    at = at or import_root()
    inside = at / "fedveil"
    sources = {f"fedveil/{source.name}": source for source in inside.glob("*.py")}
    for name in (*APP_PACKAGES, *APP_LINKS):
        base = at / name if name in APP_LINKS and (at / name / "__init__.py").is_file() else inside / name
        prefix = name if name in APP_LINKS else f"fedveil/{name}"
        sources |= {f"{prefix}/{source.relative_to(base).as_posix()}": source for source in base.rglob("*.py")}
    return dict(sorted(sources.items()))
