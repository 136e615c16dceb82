"""Find other data folders that may have the same rows as a given one: subfolders, parent folders and link targets.

Each data folder with a private run has an id file (data_sets.py). The search looks only for these files; it reads no
rows.

| layout | found |
|---|---|
| DATA/sub or DATA's parent has an id file | that file |
| DATA/train.jsonl is a link to another folder | the id files of that folder and its parent folders |
| DATA itself is also mounted at another path | nothing to find: the id file is in DATA |
| part of DATA is mounted at another path; a file has a hard link elsewhere; a copy | nothing |
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_ENTRIES", "FolderScan", "find_id_files", "scan_folder"]

MAX_ENTRIES = 200_000  # entries of a data folder that are examined


@dataclass(frozen=True)
class FolderScan:
    """Other folders' marks and the links in a data folder's tree, as far as the tree was searched.

    Attributes:
        id_files: the id files of subfolders, without the folder's own id file.
        links: the links to places outside the folder.
        is_whole: whether the folder has at most MAX_ENTRIES entries, so that all were examined.
    """

    id_files: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    is_whole: bool = True


def scan_folder(folder: Path, id_file: str) -> FolderScan:
    """Search a resolved data folder without following links."""
    entries = list(itertools.islice(_walk(folder), MAX_ENTRIES + 1))
    own = os.path.join(folder, id_file)
    ids = [Path(entry.path) for entry in entries if entry.name == id_file and entry.path != own]
    links = [Path(entry.path) for entry in entries if entry.is_symlink()]
    outside = [link for link in links if not Path(os.path.realpath(link)).is_relative_to(folder)]
    return FolderScan(tuple(ids), tuple(outside), len(entries) <= MAX_ENTRIES)


def find_id_files(folder: Path, scan: FolderScan, id_file: str) -> tuple[Path, ...]:
    """Return the id files of other folders that may have the same rows as a resolved folder, outermost first."""
    targets = [Path(os.path.realpath(link)) for link in scan.links]
    inner = [target if target.is_dir() else target.parent for target in targets]
    around = [parent for one in inner for parent in (one, *one.parents)] + [*folder.parents]
    found = {path for one in around if os.path.exists(path := one / id_file)}
    return tuple(sorted((found | set(scan.id_files)) - {folder / id_file}))


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries below a folder, level by level; a folder that cannot be listed counts as empty."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop(0)) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # no row in it can be read either
            continue
