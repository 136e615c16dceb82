"""Unix sockets by path, also where the path is longer than the system takes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import WorkerError

_SUN_PATH = 100  # sockaddr_un holds 108 bytes on Linux, 104 elsewhere


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A name of a socket that is short enough for the system; on Linux a long one goes through its folder's descriptor."""
    if len(os.fsencode(path)) <= _SUN_PATH:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise WorkerError(f"state-dir: expected a path of at most {_SUN_PATH - 40} bytes, found {path}; name another")
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def listens(path: Path) -> bool:
    """Whether a process accepts connections on this socket."""
    with address(path) as name, socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(name)
        except OSError:
            return False
    return True
