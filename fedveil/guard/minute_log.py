"""Limit log lines that a remote peer could trigger without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flwr.supercore import log

SECONDS = 60.0


class MinuteLog:
    """Log lines limited to one per minute; lines that differ in `key` have separate limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str, float] = {}

    def write(self, level: int, words: str, key: str = "") -> None:
        """Write `words`, unless there was a line of this key within the last minute.

        The key is `words` if none is given. A peer that cannot choose the key cannot fill the log.
        """
        with self._lock:
            now, key = self._clock(), key or words
            if now - self._written.get(key, float("-inf")) < SECONDS:
                return
            self._written = {old: at for old, at in self._written.items() if now - at < SECONDS} | {key: now}
        log(level, "%s", words)
