"""Find the marks of other data that may have the same rows as a site's data (data_marks.py). No row is read.

| layout | what is found |
|---|---|
| a folder or file in DATA, or a folder around it, has a mark | that mark |
| DATA/train.jsonl is a link to another folder | the marks of its target, in it and around it |
| a marked file beside DATA or beside a folder around it | its mark, if the data has a hard link or copy of it, also
  as it was at a former charge; or if it is gone from its place, because it may be anywhere below it now |
| another path mounts DATA itself | nothing to find: the mark is in it |
| another path mounts a part of DATA; a hard link or copy of it elsewhere | nothing |
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedveil.client_app.state.data_marks import (
    ID_FILE,
    DataMark,
    hash_file,
    is_mark,
    is_mark_of_file,
    mark_path,
    read_mark,
)

__all__ = ["MAX_ENTRIES", "DataScan", "find_marks", "scan_data"]

MAX_ENTRIES = 200_000  # of a data folder that are looked at


@dataclass(frozen=True)
class DataScan:
    """What lies in a site's data, as far as it was looked through.

    Attributes:
        roots: the data, and the folders and files outside it to which links lead.
        marks: in them.
        paths: of all other entries in them.
        links: in the data, to places outside it.
        is_whole: whether there are at most MAX_ENTRIES entries, so that all were looked at.
    """

    roots: tuple[Path, ...]
    marks: tuple[Path, ...]
    paths: tuple[str, ...]
    links: tuple[Path, ...]
    is_whole: bool

    @cached_property
    def files(self) -> dict[str, os.stat_result]:
        """Return the status of its regular files."""
        found: dict[str, os.stat_result] = {}
        for path in self.paths:
            try:
                status = os.lstat(path)
            except OSError:  # removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                found[path] = status
        return found


def scan_data(data: Path) -> DataScan:
    """Look through a resolved data folder or file, and through what its links lead to."""
    roots, waiting, paths = dict[Path, None](), [data], list[str]()
    links, left = list[Path](), MAX_ENTRIES
    while waiting:
        root = waiting.pop()
        if any(one in roots for one in (root, *root.parents)):
            continue
        roots[root] = None
        if not root.is_dir():
            paths.append(str(root))
            continue
        entries = list(itertools.islice(_walk(root), left + 1))
        left = max(left - len(entries), -1)
        paths += [entry.path for entry in entries]
        targets = {Path(entry.path): Path(os.path.realpath(entry.path)) for entry in entries if entry.is_symlink()}
        outside = [link for link, target in targets.items() if not target.is_relative_to(data)]
        links += [link for link in outside if link.is_relative_to(data)]
        waiting += [targets[link] for link in outside]
    marks = tuple(Path(path) for path in paths if is_mark(os.path.basename(path)))
    return DataScan(tuple(roots), marks, tuple(paths), tuple(links), left >= 0)


def find_marks(data: Path, scan: DataScan, tag: str) -> tuple[Path, ...]:
    """Return the marks of other data that may have the same rows as resolved data, outermost first.

    Args:
        tag: of this site's ledger, whose marks near the data are returned too; "" for none.

    Raises:
        StateError: a mark near it cannot be read.
    """
    folders = {root if root.is_dir() else root.parent for root in scan.roots}
    around = {parent for folder in folders for parent in (folder, *folder.parents)}
    exact = {folder / ID_FILE for folder in around} | {mark_path(root) for root in scan.roots}
    found = {path for path in exact if path.exists()} | set(scan.marks)
    near = (path for folder in around for path in _marks_of_files(folder) if path not in found)
    return tuple(sorted((found | {path for path in near if _may_be_in(path, scan, tag)}) - {mark_path(data)}))


def _may_be_in(path: Path, scan: DataScan, tag: str) -> bool:
    """Return whether the file of the mark at `path` may be in the data under another name."""
    mark = read_mark(path)
    if mark.ledger is not None and mark.ledger.tag == tag:
        return True
    try:
        status = os.lstat(path.with_name(mark.file))
    except OSError:
        return True
    if not stat.S_ISREG(status.st_mode):
        return True
    return any(_is_same(status, mark, *file) for file in scan.files.items())


def _is_same(status: os.stat_result, mark: DataMark, path: str, other: os.stat_result) -> bool:
    """Return whether a file is the marked one under another name, or a copy of a version of it that was charged."""
    if os.path.samestat(status, other):
        return True
    hashes = {digest for size, _, digest in mark.versions if size and size == other.st_size}
    try:
        return bool(hashes) and hash_file(path) in hashes
    except OSError:  # it cannot be read now: nothing shows that it is another
        return True


def _marks_of_files(folder: Path) -> list[Path]:
    """Return the marks of data files in a folder; none if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if is_mark_of_file(entry.name)]
    except OSError:
        return []


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
