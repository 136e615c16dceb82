"""Limit log lines that the other side of a connection could trigger without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flwr.supercore import log

SECONDS = 60.0


class MinuteLog:
    """Writes a line at most once a minute; of lines that differ in `key` alone, each at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str, float] = {}

    def write(self, level: int, words: str, key: str = "") -> None:
        """Writes `words`, unless there was a line of this key within the last minute; the words are the key if none is
        given. Who cannot choose the key cannot fill the log."""
        with self._lock:
            now, key = self._clock(), key or words
            if now - self._written.get(key, float("-inf")) < SECONDS:
                return
            self._written = {old: at for old, at in self._written.items() if now - at < SECONDS} | {key: now}
        log(level, "%s", words)
