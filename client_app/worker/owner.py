"""The owner of a worker: the SuperNode process that a client process belongs to."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_CLOCK_SECONDS = 2.0


def process_start_time(pid: int) -> float:
    """Return a process's start time in seconds. Raises psutil.NoSuchProcess.

    On Linux it counts from boot, so clock changes do not affect it; elsewhere it is the system clock's time.
    """
    process = psutil.Process(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return float(process.create_time())
    return int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # after the name, which may contain ")"


@dataclass(frozen=True)
class OwnerProcess:
    """A process, identified by its id and start time, because the system reuses ids."""

    pid: int
    created: float

    @classmethod
    def from_pid(cls, pid: int) -> OwnerProcess:
        """Return the process that currently has this id. Raises psutil.NoSuchProcess."""
        return cls(pid, process_start_time(pid))

    @classmethod
    def parse(cls, text: str) -> OwnerProcess:
        """Return the owner whose `str` is `text`."""
        pid, _, created = text.partition(":")
        return cls(int(pid), float(created))

    def __str__(self) -> str:
        return f"{self.pid}:{self.created}"

    def is_(self, other: OwnerProcess) -> bool:
        """Return whether both are the same process.

        Start times may differ slightly if they follow the system clock.
        """
        return self.pid == other.pid and abs(self.created - other.created) < _CLOCK_SECONDS

    def runs(self) -> bool:
        """Return whether this process is still running."""
        try:
            process = psutil.Process(self.pid)
            return (
                self.is_(OwnerProcess(self.pid, process_start_time(self.pid)))
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False


def owner_of_this_process() -> OwnerProcess | None:
    """Return the SuperNode that started this client process, or the SuperExec if it runs separately.

    None if this is not a deployment's client process, for example in the simulation engine or in a test.
    """
    if Path(sys.argv[0]).name != "flwr-clientapp":
        return None
    owners = {}
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline()[:3]:
                owners[Path(word).name] = OwnerProcess(process.pid, process_start_time(process.pid))
    return owners.get("flower-supernode") or owners.get("flower-superexec")
