"""Errors of a disk, such as a full one, as messages for the person who ran a command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import ConfigError

__all__ = ["report_disk_errors"]


@contextlib.contextmanager
def report_disk_errors(place: Path) -> Iterator[None]:
    """Raise ConfigError, naming `place`, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{place}: expected a place that this user can write, found an error: {error}") from None
