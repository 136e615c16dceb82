"""Kill processes in a run: random kill points, and the thread that waits for a point.

The victim is the ServerApp, the SuperLink's machine, a site's machine, its worker or its client process. It is killed
as soon as a file shows that the run has reached a randomly drawn event (a message was sent, a checkpoint was replaced,
a record was written, a round was counted, a private state was stored, a ledger was charged), or a random time later.
The killed programs contain no code for this.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import rng

SITES = ("north", "south")
ROUNDS = 3
_AT_SERVER = {"sent": 2 * len(SITES) * ROUNDS, "checkpoint": ROUNDS + 1, "recorded": ROUNDS}
_AT_SITE = {"counted": ROUNDS, "kept": ROUNDS}
VICTIMS = ("serverapp", "superlink", "site", "worker", "client")
PROGRAMS = {"serverapp": "flwr-serverapp", "worker": "client_app.worker.worker_main", "client": "flwr-clientapp"}


@dataclass(frozen=True)
class KillPoint:
    """A case, a victim and a time: `delay` seconds after the event has been seen `count` times."""

    number: int
    case: str
    victim: str
    site: str
    event: str
    count: int
    delay: float


def draw_kill_point(number: int, cases: list[str]) -> KillPoint:
    """Return the point with this number."""
    stream = rng.initial_stream(number, "faults")

    def one(of: list[Any]) -> Any:
        return of[stream.choice(len(of), 1)[0]]

    case, victim, site = cases[number % len(cases)], one(list(VICTIMS)), one(list(SITES))
    charged = {"charged": ROUNDS} if case == "dp" else {}
    events = _AT_SERVER if victim in ("serverapp", "superlink") else _AT_SITE | charged
    event = one(sorted(events))
    delay = one([0.0, 0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
    return KillPoint(number, case, victim, site, event, one(list(range(1, events[event] + 1))), delay)


class ProcessKiller(threading.Thread):
    """Waits for the point's event, then kills the victim."""

    def __init__(self, point: KillPoint, victims: Callable[[], list[int]], files: Callable[[], Iterator[Path]]) -> None:
        super().__init__(daemon=True)
        self.point, self.killed, self.restored = point, False, False
        self._victims, self._files, self._end = victims, files, threading.Event()

    def run(self) -> None:
        """Poll the files every millisecond; look for the victims in between, because that takes longer."""
        before, seen, pids, looked = self._stamps(), 0, self._victims(), time.monotonic()
        while not self._end.is_set() and seen < self.point.count:
            now = self._stamps()
            seen += len(now - before)
            before = before | now
            if seen < self.point.count:
                if time.monotonic() - looked > 0.1:
                    pids, looked = self._victims(), time.monotonic()
                time.sleep(0.001)
        if self._end.wait(self.point.delay):
            return
        pids = self._victims() if self.point.delay or not pids else pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed = True

    def over(self) -> None:
        """Mark the run as ended; nothing is killed from now on."""
        self._end.set()
        self.join()

    def _stamps(self) -> set[tuple[str, int, int]]:
        found = set()
        for file in self._files():
            with suppress(OSError):
                stat = file.stat()
                found.add((str(file), stat.st_ino, stat.st_size))
        return found
