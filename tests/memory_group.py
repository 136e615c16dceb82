"""A memory cgroup for tests in which the kernel kills for real."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PLACES = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextlib.contextmanager
def memory_group(limit_mb: int) -> Iterator[Path]:
    """A group of at most `limit_mb`, without swap. Skips where none can be made; what is left in it is killed."""
    group = _made()
    try:
        limit(group, limit_mb)
        yield group
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        group.rmdir()


def limit(group: Path, limit_mb: int) -> None:
    """Sets the group's limit."""
    name = next(name for _, name in _PLACES if (group / name).exists())
    (group / name).write_text(str(limit_mb * 1_000_000))


def join(group: Path, pid: int) -> None:
    """Puts a process into the group; what it starts from then on is in it too."""
    (group / "cgroup.procs").write_text(str(pid))


def _made() -> Path:
    for folder, name in _PLACES:
        group = folder / f"fedveil-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / name).exists():
            return group
        group.rmdir()
    pytest.skip("no memory cgroup can be made here: it needs root, and the kernel's memory controller")
