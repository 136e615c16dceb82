"""An offline bundle: a folder with a manifest that a person carries to a site without a network.

    wheels/            FedVeil and all its dependencies
    images/            container images, as files
    constraints.txt    the versions of all packages
    INSTALL.md         instructions for the site
    MANIFEST.json      every other file with its size and SHA-256, and the origin of the bundle

The manifest shows whether the folder arrived unchanged, not who made it: send its SHA-256 over another channel.
(The bundle that Flower sends to sites is something else: fedveil/console/flower/app_bundle.py.)
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedveil import __version__, paths
from fedveil.console.flower.processes import ProcessGroup
from fedveil.errors import ConfigError, StateError

MANIFEST = "MANIFEST.json"
_COLLECT_SECONDS = 3600.0
_INSTALL = """\
# FedVeil {version} without a network

Compare the SHA-256 of MANIFEST.json with the person who made this folder. The commands below need no network.

    docker load -i images/NAME.tar                    # each image

Without containers, on Python {python} of the same system ({machine}):

    python3 -m venv venv
    venv/bin/pip install --no-index --find-links wheels -c constraints.txt fedveil
    venv/bin/fedveil bundle verify .
"""


class OfflineBundle:
    """One offline bundle.

    Attributes:
        folder: its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path, source: Path | None, images: Sequence[str]) -> OfflineBundle:
        """Collect wheels and images in the new folder, all or nothing; no manifest yet.

        Args:
            source: a checkout from which to build FedVeil's wheel; None = this installation.
            images: names of container images that this machine's engine has.

        Raises:
            ConfigError: `source` is not a checkout.
            StateError: `folder` already exists.
            LaunchError: pip or the engine failed; it includes the last lines of output.
        """
        for name in ("pyproject.toml", "constraints.txt", "lock/run.txt"):
            if source and not (source / name).is_file():
                raise ConfigError(f"--source: expected a checkout, found no {name} in {source}; name a checkout")
        if folder.exists():
            raise StateError(f"offline bundle: expected a folder that does not exist yet, found {folder}; name another")
        partial = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "images").mkdir(parents=True)
        try:
            _collect(partial, source and source.absolute(), images)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return cls(folder)

    @property
    def manifest(self) -> Path:
        """Return the content of MANIFEST.json."""
        return self.folder / MANIFEST

    def write_manifest(self) -> str:
        """Write the manifest and return a one-line summary. Raises StateError for an empty or missing folder."""
        if not self.folder.is_dir():
            raise StateError(
                f"offline bundle: expected a folder, found none at {self.folder}; collect wheels and images in one"
            )
        files = list_wheels(self.folder)
        if not files:
            raise StateError(
                f"offline bundle: expected files in {self.folder}, found none; collect wheels and images in it"
            )
        made = {"fedveil": __version__, "python": platform.python_version(), "machine": platform.machine()}
        self.manifest.write_text(json.dumps({"made": made, "files": files}, indent=1, sort_keys=True) + "\n")
        total = sum(entry["bytes"] for entry in files.values())
        return f"{self.manifest}: {len(files)} files, {total:,} bytes; SHA-256 {_sha256(self.manifest)}"

    def verify(self) -> str:
        """Compare the folder with its manifest and return a one-line summary. Raises StateError on a difference."""
        try:
            expected = json.loads(self.manifest.read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(
                f"{self.manifest}: expected a manifest, found none ({type(error).__name__}); copy the folder again"
            ) from None
        files = list_wheels(self.folder)
        for name in sorted(set(expected) | set(files)):
            if expected.get(name) != files.get(name):
                what = "missing" if name not in files else "not in the manifest" if name not in expected else "changed"
                raise StateError(
                    f"{self.folder / name}: expected the file as the manifest lists it, found it {what}; copy the "
                    "folder again"
                )
        return f"{self.folder}: {len(files)} files, all unchanged; SHA-256 of the manifest {_sha256(self.manifest)}"


def list_wheels(folder: Path) -> dict[str, dict[str, Any]]:
    """Return bytes and sha256 of every file below `folder` except the manifest. Raises StateError for a link."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise StateError(f"{path}: expected files and folders, found a link; put the file itself there")
        if path.is_file() and name != MANIFEST:
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return files


def _collect(folder: Path, source: Path | None, images: Sequence[str]) -> None:
    """Fill the folder, except for the manifest."""
    processes = ProcessGroup(folder)
    constraints = source / "constraints.txt" if source else paths.find_file("constraints.txt")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder / "wheels"), "--no-deps"]
    wheel += ["--no-build-isolation"]  # otherwise pip would fetch build dependencies of any version
    locked, device = [*wheel, "--require-hashes"], "cpu" if version("torch").endswith("+cpu") else "cuda"
    index = os.environ.get("TORCH_INDEX") if device == "cpu" else None
    with tempfile.TemporaryDirectory(prefix="fedveil-bundle-") as clean:
        # A checkout's build/ may contain deleted modules, which would end up in the wheel.
        copy = paths.copy_checkout(Path(clean) / "source", source)
        lock = copy / "lock"
        torch = [*(["--index-url", index] if index else []), "-r", str(lock / f"{device}.txt")]
        for what in ([*locked, *torch], [*locked, "-r", str(lock / "run.txt")], [*wheel, "--no-index", str(copy)]):
            processes.call("wheels", what, os.environ, _COLLECT_SECONDS)
    for image in images:
        file = folder / "images" / f"{image.replace('/', '_').replace(':', '-')}.tar"
        processes.call("image", ["docker", "save", "-o", str(file), image], os.environ, _COLLECT_SECONDS)
    shutil.copy(constraints, folder)
    python = ".".join(platform.python_version_tuple()[:2])
    text = _INSTALL.format(version=__version__, python=python, machine=platform.machine())
    (folder / "INSTALL.md").write_text(text)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
