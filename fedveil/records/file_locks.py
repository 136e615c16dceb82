"""Wait for another process's lock on a file for a limited time. Does not import torch."""

from __future__ import annotations

import contextlib
import fcntl
import time

__all__ = ["lock_within"]

_POLL_SECONDS = 0.05


def lock_within(descriptor: int, seconds: float) -> bool:
    """Lock an open file exclusively; return False if another process still holds it after `seconds`.

    The lock ends when the descriptor is closed. Raises OSError, for example on a file system without locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
