"""Folders through which relay messages ("letters") arrive and leave; the carrier writes to them.

A letter is a file whose name ends in ".relay". The rest of the name has no meaning; only the content matters.

| in the incoming folder | what happens |
|---|---|
| another name, such as that of a file being copied (".x.relay.tmp") | ignored |
| a file that has changed since the last scan | read once it stops changing |
| a link, a folder, a pipe, a device | refused; it is not followed |
| a file that cannot be read | refused |
| more than 10,000 names | StateError: a person has to clear the folder |
| a file that was accepted or refused | ignored until it changes |

Files in the folder are never changed or removed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fedveil.errors import StateError, WireError
from fedveil.sanitize import sanitize

SUFFIX = ".relay"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.relay")
_MOST_NAMES = 10_000

Seen = tuple[int, int, int]


@dataclass
class IncomingFolder:
    """A folder in which letters arrive.

    Attributes:
        waits: True if the last scan found a file that had just changed.
    """

    folder: Path
    waits: bool = True
    _before: dict[str, Seen] = field(default_factory=dict)
    _judged: dict[str, Seen] = field(default_factory=dict)

    def next(self) -> str | None:
        """Return the first unprocessed file name in sorted order; the file then counts as processed.

        Raises:
            StateError: the folder is missing, cannot be read, or is too full.
        """
        self.waits = False
        now = self._look()
        ready = [name for name, seen in now.items() if self._judged.get(name) != seen]
        self.waits = any(self._before.get(name) != now[name] for name in ready)
        steady = sorted(name for name in ready if self._before.get(name) == now[name])
        self._before, self._judged = now, {name: seen for name, seen in self._judged.items() if name in now}
        if not steady:
            return None
        self._judged[steady[0]] = now[steady[0]]
        return steady[0]

    def _look(self) -> dict[str, Seen]:
        files: dict[str, Seen] = {}
        try:
            with os.scandir(self.folder) as entries:
                for number, entry in enumerate(entries):
                    if number >= _MOST_NAMES:
                        raise StateError(f"{self.folder}: it has more than {_MOST_NAMES} files; remove answered files")
                    if _NAME.fullmatch(entry.name) and (seen := _seen(entry)) is not None:
                        files[entry.name] = seen
        except OSError as error:
            raise StateError(
                f"{self.folder}: the folder for exchanged files cannot be read ({type(error).__name__}); create it"
            ) from None
        return files

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a regular file. Raises WireError for anything else."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(
                f"{name}: it is not a readable regular file ({sanitize(error.strerror, 80)}); copy the file itself"
            ) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise WireError(f"{name}: it is not a regular file; copy the file itself")
        with os.fdopen(descriptor, "rb") as file:
            yield file


def _seen(entry: os.DirEntry[str]) -> Seen | None:
    try:
        about = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # removed since the folder was listed
    return about.st_size, about.st_mtime_ns, about.st_ino
