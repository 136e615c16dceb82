"""Unix sockets by path, including paths longer than the system allows."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import WorkerError

_SUN_PATH = 100  # sockaddr_un holds 108 bytes on Linux, 104 elsewhere


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Return a name for the socket that is short enough; on Linux, a long path is replaced by one through the folder's
    descriptor.

    Raises:
        WorkerError: the path is too long, and this system has no /proc.
    """
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise WorkerError(f"state-dir: {path} has more than {_SUN_PATH - 40} bytes; choose a shorter path")
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def is_listening(path: Path) -> bool:
    """Return whether a process accepts connections on this socket."""
    with socket_address(path) as name, socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(name)
        except OSError:
            return False
    return True
