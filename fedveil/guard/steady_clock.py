"""A clock for the SuperLink's leases that a step of the machine's clock does not move.

Flower stores until when a site or task counts as alive, by wall time. A step of two hours, if only for forty seconds,
then ends every lease: the run fails, and every site is offline. Leases last about a minute, so elapsed time decides.

| the machine's clock | this clock |
|---|---|
| goes on, give or take two seconds | is the machine's |
| has jumped forward, or the machine slept | goes on by elapsed time, and one log line names the step |
| stays there | follows it, at most a quarter faster, so that no lease ends early |
| has jumped back | follows at once, and one log line names the step |

An earlier time ends no lease. One later than the machine's would end messages early, whose life begins at wall time.

Signed times of sites are compared with the machine's clock (signed_time.py), and last days of keys with a clock that
never goes back (registry_files.py).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from logging import WARNING

from flwr.supercore import log

STEP_SECONDS = 2.0
_RATE = 0.25  # seconds per elapsed second by which it follows a step
_NAME = "now"
_STATES = tuple(
    f"flwr.{module}"
    for module in (
        "server.superlink.linkstate.sql_linkstate", "server.superlink.linkstate.in_memory_linkstate",
        "server.superlink.linkstate.utils", "supercore.corestate.sql_corestate",
        "supercore.corestate.in_memory_corestate",
    )
)  # fmt: skip


class SteadyClock:
    """The clock of one process. `wall` and `monotonic` are the machine's."""

    def __init__(
        self,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._lock = threading.Lock()
        self._latest, self._at, self._gap = wall(), monotonic(), 0.0

    def now(self) -> datetime:
        """Return the current time in UTC."""
        with self._lock:
            wall, at = self._wall(), self._monotonic()
            elapsed, self._at = at - self._at, at
            expected = self._latest + timedelta(seconds=elapsed)
            gap = (wall - expected).total_seconds()
            if abs(gap) <= STEP_SECONDS:
                self._latest, self._gap = wall, 0.0
                return wall
            if abs(gap - self._gap) > STEP_SECONDS:
                log(
                    WARNING,
                    "the machine's clock jumped by %+.0f s to %s UTC; no lease ends by that. If that time is "
                    "wrong, correct it: sites compare theirs with it",
                    gap - self._gap,
                    f"{wall:%Y-%m-%d %H:%M:%S}",
                )
            follow = gap if gap < 0 else min(_RATE * elapsed, gap)
            self._gap = gap - follow
            self._latest = expected + timedelta(seconds=follow)
            return self._latest


def patch_lease_clock() -> None:
    """Make the SuperLink's states in this process use one `SteadyClock`."""
    clock = SteadyClock()
    for module in _STATES:
        setattr(importlib.import_module(module), _NAME, clock.now)
