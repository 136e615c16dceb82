"""List and remove a site's cached examples (fedveil/data/dataset_cache.py), with their size and age.

Caches are rebuilt on demand, so they can be removed at any time. A worker that has mapped a cache can still
use it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.client_app.state.data_sets import PREPARED
from fedveil.records import audit_log

_DAY = 86_400.0


@dataclass(frozen=True)
class CachedDataset:
    """One set of prepared examples, or the leftover of an interrupted write.

    Attributes:
        data_set: the data set's name, or "path-" and a hash of its folder.
        path: the set's folder.
        bytes: its size.
        last: when it was last used, in seconds since the epoch.
    """

    data_set: str
    path: Path
    bytes: int
    last: float

    @property
    def days(self) -> float:
        """Return the days since it was last used."""
        return (time.time() - self.last) / _DAY


def list_cached_datasets(state_dir: Path) -> list[CachedDataset]:
    """Return all sets in a state folder, sorted by data set, least recently used first."""
    datasets = []
    for path in (state_dir.expanduser() / PREPARED).glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
            size = sum(file.lstat().st_size for file in _files(path))
            datasets.append(CachedDataset(path.parent.name, path, size, path.lstat().st_mtime))
    return sorted(datasets, key=lambda of: (of.data_set, of.last))


def remove_cached(state_dir: Path, sets: Iterable[CachedDataset]) -> None:
    """Remove sets after recording each in the site's audit log.

    Raises:
        StateError: the audit log cannot be written; sets not yet recorded are kept.
    """
    for of in sets:
        about = {"file": of.path.relative_to(state_dir.expanduser()).as_posix(), "bytes": of.bytes}
        audit_log.append_entry(state_dir.expanduser() / audit_log.NAME, "purged", about)
        if of.path.is_dir() and not of.path.is_symlink():
            shutil.rmtree(of.path)
        else:
            of.path.unlink(missing_ok=True)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in ([path] if path.is_file() else path.iterdir()) if not file.is_dir())
