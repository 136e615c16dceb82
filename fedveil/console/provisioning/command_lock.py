"""The lock of a command that changes a file in the registry: of two at once, the second waits for the first.

Otherwise the later one would undo what the earlier did, such as a revocation.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.records.file_locks import lock_within

_WAIT_SECONDS = 2.0  # for another command, before this one says that it waits


@contextlib.contextmanager
def hold_lock(file: Path, command: str) -> Iterator[None]:
    """Hold the lock in `file`, which is created, until the block ends or the process does. Raises ConfigError.

    Args:
        command: "members" or "operators", for the message to a person who waits.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a file that this user can write, found none ({error}); run the command as the user who "
            "owns the folder"
        ) from None
    try:
        _lock(descriptor, file, command)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(descriptor: int, file: Path, command: str) -> None:
    """Wait until no other process holds the lock; after two seconds, say so."""
    if lock_within(descriptor, _WAIT_SECONDS):
        return
    print(
        f"{command}: waiting for another fedveil {command} command, which is changing {file.parent}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    fcntl.flock(descriptor, fcntl.LOCK_EX)
