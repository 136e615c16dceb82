"""`fedveil bundle`: a folder that is carried to a site without a network, with its manifest, and the check of it there.

    fedveil bundle make FOLDER         wheels of FedVeil and everything that it needs, and images, in a new folder; manifest
    fedveil bundle manifest FOLDER     writes FOLDER/MANIFEST.json: every file with its size and SHA-256, and what made it
    fedveil bundle verify FOLDER       finds a file that is missing, changed, or not in the manifest

The manifest says whether the folder arrived as it left, not who made it: hand over the SHA-256 that both commands print
on another way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedveil import __version__, places
from fedveil.errors import ConfigError, StateError

NAME = "MANIFEST.json"
_COLLECT_SECONDS = 3600.0
_INSTALL = """\
# FedVeil {version} without a network

Read the SHA-256 of MANIFEST.json to whoever made this folder. Nothing below asks the network for anything.

    docker load -i images/NAME.tar                    # each image

Without containers, on Python {python} of the same system ({machine}):

    python3 -m venv venv
    venv/bin/pip install --no-index --find-links wheels -c constraints.txt fedveil
    venv/bin/fedveil bundle verify .
"""


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("bundle", help="write or verify the manifest of an offline bundle")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="collect wheels and images in a new folder; needs the network, once")
    make.add_argument(
        "--source", type=Path, default=None, metavar="FOLDER", help="a checkout; default: this installation"
    )
    make.add_argument(
        "--image", action="append", metavar="NAME", help=f"default: fedveil:{__version__}; may be repeated"
    )
    make.add_argument("--no-images", action="store_true", help="wheels alone")
    make.add_argument("folder", type=Path)
    make.set_defaults(run=_make)
    for name, run, words in (
        ("manifest", _manifest, "list every file of a folder with its hash"),
        ("verify", _verify, "compare a folder with its manifest"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument("folder", type=Path)
        action.set_defaults(run=run)


def _make(args: argparse.Namespace) -> int:
    for name in ("pyproject.toml", "constraints.txt") if args.source else ():
        if not (args.source / name).is_file():
            raise ConfigError(f"--source: expected a checkout, found no {name} in {args.source}; name one")
    if args.folder.exists():
        raise StateError(f"bundle: expected a folder that does not exist yet, found {args.folder}; name another")
    images = [] if args.no_images else args.image or [f"fedveil:{__version__}"]
    partial = args.folder.with_name(f".{args.folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)
    try:
        _collect(partial, args.source and args.source.absolute(), images)
        partial.replace(args.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _manifest(args)


def _collect(folder: Path, source: Path | None, images: list[str]) -> None:
    """Fills wheels/ and images/. Raises LaunchError with pip's or the engine's last lines."""
    import os

    from fedveil.console.flower.processes import Processes

    processes, constraints = Processes(folder), source / "constraints.txt" if source else places.file("constraints.txt")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--wheel-dir",
        str(folder / "wheels"),
        "-c",
        str(constraints),
    ]
    env = {**os.environ, "PIP_CONSTRAINT": str(constraints)}  # for what builds a wheel, too
    with tempfile.TemporaryDirectory(prefix="fedveil-bundle-") as clean:
        # A checkout's build/ keeps modules that were deleted since, and the wheel would have them.
        copy = places.lay_out(Path(clean) / "source", source)
        processes.call("wheels", [*pip, str(copy)], env, _COLLECT_SECONDS)
    for image in images:
        file = folder / "images" / f"{image.replace('/', '_').replace(':', '-')}.tar"
        processes.call("image", ["docker", "save", "-o", str(file), image], os.environ, _COLLECT_SECONDS)
    shutil.copy(constraints, folder)
    made = {
        "version": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
    }
    (folder / "INSTALL.md").write_text(_INSTALL.format(**made))


def _manifest(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise StateError(f"bundle: expected a folder, found none at {args.folder}; collect wheels and images in one")
    found = listed(args.folder)
    if not found:
        raise StateError(f"bundle: expected files in {args.folder}, found none; collect wheels and images in it")
    made = {"fedveil": __version__, "python": platform.python_version(), "machine": platform.machine()}
    file = args.folder / NAME
    file.write_text(json.dumps({"made": made, "files": found}, indent=1, sort_keys=True) + "\n")
    print(
        f"{file}: {len(found)} files, {sum(entry['bytes'] for entry in found.values()):,} bytes; SHA-256 {_sha256(file)}"
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    file = args.folder / NAME
    try:
        expected = json.loads(file.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{file}: expected a manifest, found none ({type(error).__name__}); copy the folder anew"
        ) from None
    found = listed(args.folder)
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            what = "missing" if name not in found else "not in the manifest" if name not in expected else "changed"
            raise StateError(
                f"{args.folder / name}: expected as the manifest has it, found it {what}; copy the folder anew"
            )
    print(f"{args.folder}: {len(found)} files, as they left; SHA-256 of the manifest {_sha256(file)}")
    return 0


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file below `folder` but the manifest: bytes and sha256 by relative path. Raises StateError for a link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise StateError(f"{path}: expected files and folders, found a link; put the file itself there")
        if path.is_file() and name != NAME:
            found[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
