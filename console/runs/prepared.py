"""The prepared rows that a site keeps (fedveil/rows/shelves.py): how much, since when, and how they are removed.

They are made anew where they are needed, so any of them may go at any time: a worker that has them mapped keeps them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.site.data_sets import PREPARED
from fedveil.records import audit_log

_DAY = 86_400.0


@dataclass(frozen=True)
class Set:
    """One set of prepared rows, or what an interrupted write left of one.

    Attributes:
        data_set: the name of its data set, or "path-" and a hash of its folder.
        path: the set's folder.
        bytes: in it.
        last: when it was last used, in seconds since the epoch.
    """

    data_set: str
    path: Path
    bytes: int
    last: float

    @property
    def days(self) -> float:
        """Since it was last used."""
        return (time.time() - self.last) / _DAY


def prepared(state_dir: Path) -> list[Set]:
    """Every set below a state folder, by data set, the one that was used longest ago first."""
    found = []
    for path in (state_dir.expanduser() / PREPARED).glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
            size = sum(file.lstat().st_size for file in _files(path))
            found.append(Set(path.parent.name, path, size, path.lstat().st_mtime))
    return sorted(found, key=lambda of: (of.data_set, of.last))


def remove(state_dir: Path, sets: Iterable[Set]) -> None:
    """Removes sets, each with a line in the site's audit log before it goes.

    Raises:
        StateError: the audit log cannot be written; what was not noted is still there.
    """
    for of in sets:
        about = {"file": of.path.relative_to(state_dir.expanduser()).as_posix(), "bytes": of.bytes}
        audit_log.append(state_dir.expanduser() / audit_log.NAME, "purged", about)
        if of.path.is_dir() and not of.path.is_symlink():
            shutil.rmtree(of.path)
        else:
            of.path.unlink(missing_ok=True)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in ([path] if path.is_file() else path.iterdir()) if not file.is_dir())
