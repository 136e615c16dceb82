"""The owner of a worker: the SuperNode process that a client process belongs to."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A process, identified by its id and start time, because the system gives an id again to later processes."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The process that has this id now. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    @classmethod
    def parse(cls, text: str) -> Owner:
        """The owner whose `str` is `text`."""
        pid, _, created = text.partition(":")
        return cls(int(pid), float(created))

    def __str__(self) -> str:
        return f"{self.pid}:{self.created}"

    def is_(self, other: Owner) -> bool:
        """Whether both are the same process. Start times may differ a little, for the system may correct its clock."""
        return self.pid == other.pid and abs(self.created - other.created) < _CLOCK_SECONDS

    def runs(self) -> bool:
        """Whether this process still runs."""
        try:
            process = psutil.Process(self.pid)
            return self.is_(Owner(self.pid, process.create_time())) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def owner_of_this_process() -> Owner | None:
    """The SuperNode that started this client process, or the SuperExec if that runs apart from the SuperNode.

    None outside a deployment's client process, as in the simulation engine or in a test.
    """
    if Path(sys.argv[0]).name != "flwr-clientapp":
        return None
    found = {}
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline()[:3]:
                found[Path(word).name] = Owner(process.pid, process.create_time())
    return found.get("flower-supernode") or found.get("flower-superexec")
