"""Notes on how data was read: conversions, unread files, encodings. Notes are logged and can be collected.

A note never contains a row value.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["MAX_NOTES", "collect_notes", "note"]

MAX_NOTES = 16  # maximum number kept per reading; all notes are logged
log = logging.getLogger("fedveil.data")
_collected: ContextVar[list[str] | None] = ContextVar("fedveil_reading_notes", default=None)


def note(text: str) -> None:
    """Log a note, and keep it for the caller of `collect_notes`."""
    log.warning("task.data: %s", text)
    notes = _collected.get()
    if notes is not None and text not in notes and len(notes) < MAX_NOTES:
        notes.append(text)


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Return a context that yields a list of the notes made within it, without duplicates.

    Notes from threads started within it are only logged.
    """
    notes: list[str] = []
    token = _collected.set(notes)
    try:
        yield notes
    finally:
        _collected.reset(token)
