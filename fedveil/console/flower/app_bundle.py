"""The app as Flower sends it: the source folder, the bundle that `flwr build` makes from it, and the bundle digest.

This installation's app is byte-for-byte identical in a checkout and in a wheel, because the bundle is made from a
copy with only pyproject.toml, LICENSE and the app's Python files.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil import paths
from fedveil.console.flower.processes import ProcessGroup, flower_environment
from fedveil.errors import ConfigError

_BESIDE = ("pyproject.toml", "LICENSE")


def own_app(target: Path) -> Path:
    """Write this installation's app to the new folder `target`."""
    sources = {name: paths.find_file(name) for name in _BESIDE} | paths.app_sources()
    for name, source in sources.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    return target


@contextmanager
def copy_app(app: Path | None) -> Iterator[Path]:
    """Yield a copy of an app's folder without excluded files; None means this installation's app. A .fab is kept as is.

    Flower walks the whole folder, including .venv, several times, which delays a submission by 20 seconds. It refuses
    a folder not named after the app, and writes the bundle to the current folder.
    """
    if app is not None and not (app / "pyproject.toml").is_file():
        yield app
        return
    with tempfile.TemporaryDirectory(prefix="fedveil-app-") as folder:
        copy = Path(folder) / "app"
        if app is None or app.absolute() == paths.checkout_folder():
            own_app(copy)
        else:
            shutil.copytree(app, copy, symlinks=True, ignore=lambda at, names: _left_out(names, Path(at) == app))
        yield copy


def build_bundle(app: Path | None) -> bytes:
    """Return the bundle as `flwr build` makes it, or a .fab file's content. Raises ConfigError if there is no app."""
    if app is not None and app.is_file():
        return app.read_bytes()
    if app is not None and not (app / "pyproject.toml").is_file():
        raise ConfigError(
            f"app: expected a folder with pyproject.toml or a .fab file, found none at {app}; name another"
        )
    with copy_app(app) as copy:
        folder = copy.parent
        processes, env = ProcessGroup(folder), flower_environment(folder / "flower")
        processes.call("build", ["flwr", "build", "--app", str(copy)], env, cwd=folder)
        (bundle,) = folder.glob("*.fab")
        return bundle.read_bytes()


def bundle_digest(app: Path | None) -> str:
    """Return the SHA-256 of the bundle, 64 hex digits. Raises ConfigError if there is no app."""
    return hashlib.sha256(build_bundle(app)).hexdigest()


def _left_out(names: list[str], top: bool) -> set[str]:
    """Return the names excluded from every bundle because they may be large."""
    hidden = {name for name in names if name.startswith(".") and name != ".gitignore"}
    return {"__pycache__"} | ({"venv", "runs", "build", "dist"} | hidden if top else set())
