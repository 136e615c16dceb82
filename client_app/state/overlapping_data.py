"""Find other data folders that may have the same rows as one: folders in it, around it, and where its links lead.

Each data folder with a private run has an id file (data_sets.py). Only these files are looked for, no row is read.

| layout | what is found |
|---|---|
| DATA/sub or DATA's parent has an id file | that file |
| DATA/train.jsonl is a link to another folder | the id files of that folder and of those around it |
| another path mounts DATA itself | nothing to find: the id file is in it |
| another path mounts a part of DATA; a file has a second name elsewhere (hard link); a copy | nothing |
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_ENTRIES", "FolderScan", "find_id_files", "scan_folder"]

MAX_ENTRIES = 200_000  # of a data folder that are looked at


@dataclass(frozen=True)
class FolderScan:
    """Other folders' marks in a data folder's tree, and its links, as far as it was looked through.

    Attributes:
        id_files: id files of folders in it, without its own.
        links: links to places outside it.
        is_whole: whether it has at most MAX_ENTRIES entries, so that all were looked at.
    """

    id_files: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    is_whole: bool = True


def scan_folder(folder: Path, id_file: str) -> FolderScan:
    """Look through a resolved data folder, without following links."""
    entries = list(itertools.islice(_walk(folder), MAX_ENTRIES + 1))
    own = os.path.join(folder, id_file)
    ids = [Path(entry.path) for entry in entries if entry.name == id_file and entry.path != own]
    links = [Path(entry.path) for entry in entries if entry.is_symlink()]
    outside = [link for link in links if not Path(os.path.realpath(link)).is_relative_to(folder)]
    return FolderScan(tuple(ids), tuple(outside), len(entries) <= MAX_ENTRIES)


def find_id_files(folder: Path, scan: FolderScan, id_file: str) -> tuple[Path, ...]:
    """Return the id files of the other folders that may have the same rows as a resolved folder, outermost first."""
    targets = [Path(os.path.realpath(link)) for link in scan.links]
    inner = [target if target.is_dir() else target.parent for target in targets]
    around = [parent for one in inner for parent in (one, *one.parents)] + [*folder.parents]
    found = {path for one in around if os.path.exists(path := one / id_file)}
    return tuple(sorted((found | set(scan.id_files)) - {folder / id_file}))


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries below a folder, level by level; a folder that cannot be listed has none."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop(0)) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # no row of it can be read either
            continue
