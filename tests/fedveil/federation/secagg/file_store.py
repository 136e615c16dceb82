"""A site's state in a folder, as the tests of killed sites need it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.records.atomic_files import write_atomic


@dataclass(frozen=True)
class FileStore:
    """A site's state in a folder, written as `FileSecAggStore` does. Calls `after_save` once the state is on disk."""

    folder: Path
    after_save: Callable[[SiteSecAggState], None] = lambda state: None

    @property
    def file(self) -> Path:
        return self.folder / "secure.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with (self.folder / "secure.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> SiteSecAggState | None:
        return SiteSecAggState.from_bytes(self.file.read_bytes()) if self.file.exists() else None

    def save(self, kept: SiteSecAggState) -> None:
        write_atomic(self.file, kept.to_bytes())
        self.after_save(kept)
