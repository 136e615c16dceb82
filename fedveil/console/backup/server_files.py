"""The files of a federation's folder that a backup contains, and the folders of its runs.

| in a backup | left out |
|---|---|
| registry, roster, kits, compose files | `ca/ca.key`, `ca/instruction-standby.key`: they belong on another machine |
| the server's certificate and keys, its operator's token | locks, the programs' logs, incomplete replies (`spool`) |
| the control log and the runs' audit log, with their earlier files | run folders that are not asked for, or in use |
| a copy of Flower's database | |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import StateError
from fedveil.records.process_exit import LOCK

__all__ = ["CONTROL_LOG", "DATABASE", "RUNS", "is_server_file", "list_run_files", "list_run_folders", "walk_files"]

DATABASE, CONTROL_LOG, RUNS = "superlink.db", "control-log.jsonl", "runs"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_PART = r"(?!\.\.?/|\.\.?$)[A-Za-z0-9_.][A-Za-z0-9_.,=+@-]{0,127}"
_EARLIER = r"(-\d{1,18}-\d{1,18})?\.jsonl"
_KNOWN = re.compile(
    r"registry/(members|operators)\.json|ca/ca\.crt"
    rf"|server/(ca\.crt|server\.(pem|key)|superexec-secret|compose{_PART}|control-log{_EARLIER}|superlink\.db)"
    rf"|server/(flower|instruct|roster)/{_WORD}|kits/{_WORD}\.tar\.gz"
    rf"|runs/audit-log{_EARLIER}|runs/{_WORD}/({_PART}/){{0,4}}{_PART}"
)
_PASSING = re.compile(rf"{LOCK}|\.reserve|.*\.part")


def is_server_file(name: str) -> bool:
    """Return whether a file with this path in the federation's folder belongs in a backup."""
    return _KNOWN.fullmatch(name) is not None


def list_run_folders(runs: Path) -> list[Path]:
    """Return the run folders in a `run.dir`, without links. Raises StateError if it cannot be read."""
    if not runs.exists():
        return []
    try:
        with os.scandir(runs) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise StateError(f"{runs}: expected a folder that this user can read: {error.strerror}") from error
    return sorted(folder for folder in folders if (folder / "id").is_file() or (folder / "status.json").is_file())


def list_run_files(folder: Path) -> dict[str, Path]:
    """Return a run folder's files by their name in a backup. Raises StateError for a link or a strange name."""
    files = {}
    for path in walk_files(folder):
        name = f"{RUNS}/{folder.name}/{path.relative_to(folder).as_posix()}"
        if _PASSING.fullmatch(path.name):
            continue
        if not is_server_file(name):
            raise StateError(f"{path}: expected a file of a run, found one with another name; move it away")
        files[name] = path
    return files


def walk_files(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield all files below a folder, but for those named in `skip` at its top.

    Raises StateError for a link, which is not followed, or for a folder that cannot be read.
    """
    folders = [folder]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name in skip and Path(entry.path).parent == folder:
                        continue
                    if entry.is_symlink():
                        raise StateError(
                            f"{entry.path}: expected files and folders, found a link, which is not followed; replace "
                            "it by what it leads to, or remove it"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        yield Path(entry.path)
    except OSError as error:
        raise StateError(f"{error.filename}: expected a folder that this user can read: {error.strerror}") from error
