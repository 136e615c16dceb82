"""Where the files of this installation lie: in a wheel, in a checkout, or in the bundle that Flower installed.

| file | in a wheel | in a checkout |
|---|---|---|
| the folders `strategies`, `server_app`, ... and `data` | inside the package `fedveil` | beside it |
| pyproject.toml, constraints.txt, lock, LICENSE | `fedveil/checkout` | beside it |

No other module guesses a folder from `__file__`. This one imports neither torch nor Flower. Folders for what is private
are made here too.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import fedveil
from fedveil.errors import ConfigError

APP_ROOMS = ("client_app", "fedveil", "server_app", "strategies")  # what the bundle carries
_OTHER_ROOMS = ("attacks", "benchmarks", "console", "data", "guard")
_NO_SOURCE = ("build", "dist", "*.egg-info", ".*", "runs")  # at the top of a checkout; a room has a folder runs, too
_BESIDE = "checkout"  # in a wheel, the folder inside the package with the files that a checkout has beside it


def package() -> Path:
    """The folder of the running package `fedveil`."""
    return Path(fedveil.__path__[0]).absolute()


def root() -> Path:
    """The folder that must be on Python's path to import the code that is running."""
    return package().parent


def checkout() -> Path | None:
    """The folder of the checkout or bundle that is running; None in a wheel."""
    return root() if (root() / "pyproject.toml").is_file() and (root() / "strategies").is_dir() else None


def folder(name: str) -> Path:
    """A folder of this installation: "data/e2e", "benchmarks/presets". Raises ConfigError if it is missing."""
    for place in map(Path, fedveil.__path__):
        if (place / name).is_dir():
            return (place / name).absolute()
    raise ConfigError(
        f"installation: expected the folder {name}, found none below {list(fedveil.__path__)}; install fedveil again"
    )


def file(name: str) -> Path:
    """pyproject.toml, constraints.txt or LICENSE of this installation. Raises ConfigError if it is missing."""
    for place in (checkout(), package() / _BESIDE):
        if place and (place / name).is_file():
            return place / name
    raise ConfigError(
        f"installation: expected {name}, found none in {package()}; install fedveil from a wheel or a checkout"
    )


def private_folder(path: Path) -> Path:
    """`path`, which exists then: it and the parents that were missing are readable by their owner alone.

    Raises:
        OSError: it cannot be made, or is a file; it names the path.
    """
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)  # not with parents=True, which gives them the usual mode
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def lay_out(target: Path, source: Path | None = None) -> Path:
    """Copies `source`, or this installation in the layout of a checkout, to the new folder `target`, to build from."""
    compiled = shutil.ignore_patterns("__pycache__")
    if at := source or checkout():
        top = shutil.ignore_patterns(*_NO_SOURCE)
        shutil.copytree(
            at, target, ignore=lambda f, names: {*compiled(f, names), *(top(f, names) if Path(f) == at else ())}
        )
        return target
    rooms = [room for room in (*APP_ROOMS, *_OTHER_ROOMS) if room != "fedveil"]
    shutil.copytree(package() / _BESIDE, target, ignore=compiled)
    shutil.copytree(package(), target / "fedveil", ignore=compiled)
    shutil.rmtree(target / "fedveil" / _BESIDE)
    for room in rooms:
        (target / "fedveil" / room).rename(target / room)
    return target


def app_sources(at: Path | None = None) -> dict[str, Path]:
    """The app's Python files by their names in the bundle, sorted. `at`: where to look, by default `root()`."""
    at = at or root()
    beside = (at / "strategies").is_dir()
    found: dict[str, Path] = {}
    for room in APP_ROOMS:
        base = at / room if beside or room == "fedveil" else at / "fedveil" / room
        for source in base.rglob("*.py"):
            name = source.relative_to(base)
            inside = not beside and room == "fedveil" and name.parts[0] in {*APP_ROOMS, *_OTHER_ROOMS, _BESIDE}
            if not inside:
                found[f"{room}/{name.as_posix()}"] = source
    return dict(sorted(found.items()))
