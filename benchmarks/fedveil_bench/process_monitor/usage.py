"""Read the CPU time and memory of processes that come and go, from the outside."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_FIND_SECONDS = 0.25
# Patterns in a federation's process names and command lines.
PROGRAMS = {
    "flwr-serverapp": "ServerApp",
    "fedveil.client_app.worker.worker_main": "worker",
    "flwr-clientapps": "resident",  # fedveil/guard/process_zygote.py
    "flwr-clientapp": "client process",
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode",
    "flower-superexec": "SuperExec",
}


def classify_program(command: list[str]) -> str:
    """Return the kind of a process in a federation, from its name and command line; "other" if it is unknown."""
    text = " ".join(command[:6])
    return next((kind for part, kind in PROGRAMS.items() if part in text), "other")


def read_command_line(process: psutil.Process) -> list[str]:
    """Return a process's name and command line. A fork has its own name, but its parent's command line."""
    return [process.name(), *process.cmdline()]


@dataclass
class WatchedProcess:
    """One process and its measurements so far. A process that has ended keeps its last measurements.

    Attributes:
        process: the process to read.
        kind: the process kind, from `ProcessUsage.kind`.
        cpu_seconds: user and system time since the process started.
        mb, peak_mb: resident memory at the last reading, and the maximum over all readings, in 10^6 bytes.
        high_mb: maximum resident memory since the process started, as counted by Linux; 0 on other systems.
    """

    process: psutil.Process
    kind: str
    cpu_seconds: float = 0.0
    mb: float = 0.0
    peak_mb: float = 0.0
    high_mb: float = 0.0


@dataclass
class ProcessUsage:
    """Watches processes while the `with` block runs.

    Attributes:
        find: returns the processes to watch. It is called four times a second, and every returned process is watched
            until it ends.
        kind: returns the kind of a process, from its name and command line.
        every: seconds between two readings.
        shared: whether to measure PSS, for processes that share pages: summed RSS would count these once per process.
        seen: the processes, by ID.
        timeline: one entry per reading: (time.time(), {kind: resident MB of all its processes}).
    """

    find: Callable[[], Iterable[psutil.Process]]
    kind: Callable[[list[str]], str]
    every: float = 0.1
    shared: bool = False
    seen: dict[int, WatchedProcess] = field(default_factory=dict)
    timeline: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._look()  # processes that are already running are counted from now on
        for seen in self.seen.values():
            _read(seen, self.shared)
        self._before = self._cpu()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def cpu_seconds(self) -> float:
        """Return the user and system time of all processes since the block began."""
        return sum(self.cpu_by_kind().values())

    def cpu_by_kind(self) -> dict[str, float]:
        """Return the user and system time since the block began, by kind of process."""
        return {kind: seconds - self._before.get(kind, 0.0) for kind, seconds in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        """Return the CPU seconds of the processes over their whole lifetimes."""
        found: dict[str, float] = {}
        for seen in list(self.seen.values()):
            found[seen.kind] = found.get(seen.kind, 0.0) + seen.cpu_seconds
        return found

    def peaks(self, kind: str) -> list[float]:
        """Return the peak resident MB of every process of this kind, as seen in the readings."""
        return [seen.peak_mb for seen in list(self.seen.values()) if seen.kind == kind]

    def highs(self, kind: str) -> list[float]:
        """Return the maximum resident MB of every process of this kind, even between readings; only on Linux."""
        return [seen.high_mb for seen in list(self.seen.values()) if seen.kind == kind]

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._end.is_set():
            now = time.monotonic()
            if now - looked > _FIND_SECONDS:
                self._look()
                looked = now
            total: dict[str, float] = {}
            for seen in self.seen.values():
                _read(seen, self.shared)
                total[seen.kind] = total.get(seen.kind, 0.0) + seen.mb
            self.timeline.append((time.time(), total))
            self._end.wait(self.every)

    def _look(self) -> None:
        for process in self.find():
            if process.pid not in self.seen:
                with contextlib.suppress(psutil.Error):
                    self.seen[process.pid] = WatchedProcess(process, self.kind(read_command_line(process)))


def _read(seen: WatchedProcess, shared: bool) -> None:
    """Read a process. A process that has ended, but has not been reaped by its parent, still reports its CPU time."""
    seen.mb = 0.0
    with contextlib.suppress(psutil.Error):
        times = seen.process.cpu_times()
        seen.cpu_seconds = float(times.user + times.system)
        seen.mb = float(seen.process.memory_full_info().pss if shared else seen.process.memory_info().rss) / 1e6
        seen.peak_mb = max(seen.peak_mb, seen.mb)
    with contextlib.suppress(OSError, ValueError, IndexError):
        seen.high_mb = max(seen.high_mb, high_mb(seen.process.pid))


def high_mb(pid: int | str = "self") -> float:
    """Return a process's maximum resident memory so far, from the kernel (VmHWM), in 10^6 bytes.

    Raises:
        OSError, IndexError, ValueError: the process has ended, or is ending.
    """
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


@dataclass(frozen=True)
class HeldResources:
    """The resources that a process holds at one moment.

    Attributes:
        rss_mb, pss_mb: resident memory, and the same with shared pages divided among the sharing processes; 10^6 bytes.
        files: open files, sockets and pipes.
        threads: number of its threads.
    """

    rss_mb: float
    pss_mb: float
    files: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Self:
        """Read a process's resources. Raises psutil.Error if the process has ended."""
        with process.oneshot():
            memory = process.memory_full_info()
            return cls(memory.rss / 1e6, memory.pss / 1e6, process.num_fds(), process.num_threads())
