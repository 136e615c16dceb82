"""The lock for commands that change a registry file: if two run at once, the second waits for the first.

Otherwise, the later one could undo a change by the earlier one, such as a revocation.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.records.file_locks import lock_within

_WAIT_SECONDS = 2.0  # how long to wait for another command before telling the user


@contextlib.contextmanager
def hold_lock(file: Path, command: str) -> Iterator[None]:
    """Hold the lock in `file`, creating it if necessary, until the block or the process ends. Raises ConfigError.

    Args:
        command: "members" or "operators", for the message to a waiting user.
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
        os.close(descriptor)  # this also releases the lock


def _lock(descriptor: int, file: Path, command: str) -> None:
    """Wait until no other process holds the lock; print a message after two seconds."""
    if lock_within(descriptor, _WAIT_SECONDS):
        return
    say(
        f"{command}: waiting for another fedveil {command} command, which is changing {file.parent}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    fcntl.flock(descriptor, fcntl.LOCK_EX)
