"""Registry files that the operator writes and the server's programs read, and a monotonic clock.

`--fedveil-registry` names the folder with the files, members.json and operators.json. A changed file is
reloaded, so a change takes effect on the next request without a restart or command.

| the file | result |
|---|---|
| is missing, over 4 MiB, world-writable or not a regular file at startup | the program does not start |
| becomes so later | every request that needs it is refused until it is repaired: breaking it admits no one |
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm

from fedveil.errors import StateError

_MOST_BYTES = 4 << 20

T = TypeVar("T")


class WatchedJsonFile(Generic[T]):
    """A JSON file that is reloaded when it changes. `check` converts its content to the value used, or raises."""

    def __init__(self, file: Path, check: Callable[[Any], T]) -> None:
        self.file = file
        self._check = check
        self._read: tuple[tuple[int, ...], T] | None = None

    def get(self) -> T:
        """Return the current content. Raises StateError."""
        try:
            with self.file.open("rb") as file:
                about = os.fstat(file.fileno())
                stamp = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
                if self._read is not None and self._read[0] == stamp:
                    return self._read[1]
                if not stat.S_ISREG(about.st_mode) or about.st_mode & stat.S_IWOTH or about.st_size > _MOST_BYTES:
                    raise ValueError(f"it must have at most {_MOST_BYTES} bytes and must not be world-writable")
                content = self._check(json.loads(file.read(_MOST_BYTES + 1)))
        # The last error comes from an unknown key type: a single entry must not give every site an INTERNAL error.
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm,
        ) as error:  # fmt: skip
            raise StateError(
                f"{self.file}: cannot read the file made by fedveil provision ({type(error).__name__}: "
                f"{error}); restore it from a backup"
            ) from None
        self._read = (stamp, content)
        return content


class MonotonicClock:
    """A clock that never goes backward, even if the machine's clock is set back, and never below `floor`.

    So an expired key stays expired. If the machine's clock was ahead by mistake, the error remains until
    the program is restarted, or even longer if the log contains that time
    (fedveil/guard/control_log.py).
    """

    def __init__(
        self,
        floor: datetime,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest, self._at = floor, monotonic()
        self._wall, self._monotonic = wall, monotonic
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the current time in UTC."""
        with self._lock:
            at = self._monotonic()
            self._latest = max(self._wall(), self._latest + timedelta(seconds=at - self._at))
            self._at = at
            return self._latest


def format_time(text: Any) -> datetime:
    """Parse a time as written in the registry. Raises ValueError for a time without a time zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"a time needs a time zone, found {text[:40]!r}")
    return moment
