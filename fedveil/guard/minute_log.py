"""Limit log lines that a remote peer could trigger endlessly."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

from flwr.supercore import log
from flwr.supercore.logger import LOGGER_NAME

SECONDS = 60.0
# Flower's own line for a call that it answers with an error: "[Fleet.PushObject][ApiError:2007] text". Over HTTP, the
# first brackets contain the call's path; the sites' port admits only short paths that Flower has.
_REFUSED_CALL = re.compile(r"\[[^]]{1,100}\]\[(?:ApiError:[0-9]{1,9}|UnexpectedError:\w{1,60})\]")
_DROPPED_REPLY = re.compile(r"an incomplete reply of node [0-9]{1,20} is dropped: ")  # fleet/staging.py
_FAILED_CALL = re.compile(r"fleet port: [a-z_]{1,40} of node [0-9]{1,20} failed")  # with a traceback, by fleet/port.py
_OWN_TEXT = " fedveil: "  # followed by one of the fixed texts in fleet/refusal.py and a number from Flower
_MAX_KEYS = 10_000


def limit_refusal_lines() -> None:
    """Limit the log lines in this process that are caused by a site's calls."""
    logging.getLogger(LOGGER_NAME).addFilter(RefusalLineFilter())


class RefusalLineFilter(logging.Filter):
    """Limit the lines caused by a site's calls to one per minute and kind; the next line counts the suppressed ones.

    Flower writes a line for each refused call, so a site that repeats a refused call would fill the server's disk.

    | a line | kind |
    |---|---|
    | about a call that the fleet port refused | call, site and reason: the whole text |
    | about a reply that a site announced and then replaced | site and reason: the whole text |
    | about a call that failed in the fleet port, with a traceback | call and site: the whole text |
    | about a call that Flower refused | call and error only: the rest may be the caller's text |
    | any other line | not limited here |
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str, float] = {}
        self._skipped: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the line. Append the number of suppressed lines of its kind."""
        text = record.getMessage()
        call = _REFUSED_CALL.match(text)
        if call is None and not _DROPPED_REPLY.match(text) and not _FAILED_CALL.match(text):
            return True
        kind = text if call is None or text.startswith(_OWN_TEXT, call.end()) else call[0]
        with self._lock:
            now = self._clock()
            if now - self._written.get(kind, float("-inf")) < SECONDS:
                self._skipped[kind] = self._skipped.get(kind, 0) + 1
                return False
            if len(self._written) >= _MAX_KEYS:
                self._forget(now)
            self._written[kind] = now
            skipped = self._skipped.pop(kind, 0)
        if skipped:
            record.msg, record.args = f"{text} ({skipped} more such lines since the last one)", ()
        return True

    def _forget(self, now: float) -> None:
        """Drop the kinds whose minute is over. Their counts are lost; the control log has the fleet port's counts."""
        self._written = {kind: at for kind, at in self._written.items() if now - at < SECONDS}
        self._skipped = {kind: count for kind, count in self._skipped.items() if kind in self._written}


class MinuteLog:
    """Writes log lines, at most one per minute; lines with different keys have separate limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str, float] = {}

    def write(self, level: int, words: str, key: str = "") -> None:
        """Write `words`, unless a line with this key was written within the last minute.

        The key is `words` if none is given. A peer that cannot choose the key cannot fill the log.
        """
        with self._lock:
            now, key = self._clock(), key or words
            if now - self._written.get(key, float("-inf")) < SECONDS:
                return
            self._written = {old: at for old, at in self._written.items() if now - at < SECONDS} | {key: now}
        log(level, "%s", words)
