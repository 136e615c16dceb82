"""Limit log lines that a remote peer could trigger without end."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

from flwr.supercore import log
from flwr.supercore.logger import LOGGER_NAME

SECONDS = 60.0
# Flower's own line for a call that it answers with an error: "[Fleet.PushObject][ApiError:2007] text". Over HTTP the
# path of the call stands in the first brackets; the sites' port admits only short ones, and those that Flower has.
_REFUSED_CALL = re.compile(r"\[[^]]{1,100}\]\[(?:ApiError:[0-9]{1,9}|UnexpectedError:\w{1,60})\]")
_DROPPED_REPLY = re.compile(r"an incomplete reply of node [0-9]{1,20} is dropped: ")  # fleet/staging.py
_FAILED_CALL = re.compile(r"fleet port: [a-z_]{1,40} of node [0-9]{1,20} failed")  # with a traceback, by fleet/port.py
_OWN_TEXT = " fedveil: "  # what follows is one of the fixed texts of fleet/refusal.py, and a number that Flower gave
_MAX_KEYS = 10_000


def limit_refusal_lines() -> None:
    """Limit the lines of this process that a site's calls cause."""
    logging.getLogger(LOGGER_NAME).addFilter(RefusalLineFilter())


class RefusalLineFilter(logging.Filter):
    """Limit the lines that a site's calls cause to one a minute and kind; the next one counts those left out.

    Flower writes one for each refused call, so a site that repeats such a call would fill the server's disk.

    | a line | kind |
    |---|---|
    | about a call that the fleet port refused | call, site and reason: the whole text |
    | about a reply that a site announced and replaced by another | site and reason: the whole text |
    | about a call that failed in the fleet port, with a traceback | call and site: the whole text |
    | about a call that Flower refused | call and error: what follows may be the caller's text |
    | any other | not limited here |
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._written: dict[str, float] = {}
        self._skipped: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written. Append to it the number of suppressed lines of its kind."""
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
        """Drop the kinds whose minute is over. Their counts are lost; the control log has those of the fleet port."""
        self._written = {kind: at for kind, at in self._written.items() if now - at < SECONDS}
        self._skipped = {kind: count for kind, count in self._skipped.items() if kind in self._written}


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
