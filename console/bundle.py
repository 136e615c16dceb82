"""`fedveil bundle`: the manifest of a folder that is carried to a site without a network, and the check of it there.

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
from pathlib import Path
from typing import Any

from fedveil import __version__
from fedveil.errors import StateError

NAME = "MANIFEST.json"


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser("bundle", help="write or verify the manifest of an offline bundle")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, run, words in (
        ("manifest", _manifest, "list every file of a folder with its hash"),
        ("verify", _verify, "compare a folder with its manifest"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument("folder", type=Path)
        action.set_defaults(run=run)


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
