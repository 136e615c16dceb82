"""A clock for the SuperLink's leases that is not affected when the machine's clock jumps.

Flower stores the wall time until which a site or task counts as alive. If the clock jumps two hours ahead, even for
forty seconds, every lease ends: the run fails, and every site is offline. Leases last about a minute, so elapsed time
decides.

| the machine's clock | this clock |
|---|---|
| runs normally, give or take two seconds | is the machine's clock |
| has jumped forward, or the machine slept | continues by elapsed time, and one log line names the jump |
| stays ahead | catches up, running at most a quarter faster, so that no lease ends early |
| has jumped back | follows immediately, and one log line names the jump |

An earlier time does not end any lease. A time later than the machine's would end messages early, because their
lifetime starts at wall time.

Signed times from sites are compared with the machine's clock (signed_time.py), and expiry dates of keys with a clock
that never goes backwards (registry_files.py).
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
_RATE = 0.25  # seconds per elapsed second by which the clock catches up after a jump
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
                    "the machine's clock jumped by %+.0f s to %s UTC; this does not end any lease. If that time is "
                    "wrong, correct it: sites compare their clocks with it",
                    gap - self._gap,
                    f"{wall:%Y-%m-%d %H:%M:%S}",
                )
            follow = gap if gap < 0 else min(_RATE * elapsed, gap)
            self._gap = gap - follow
            self._latest = expected + timedelta(seconds=follow)
            return self._latest


def patch_lease_clock() -> None:
    """Make the SuperLink's states in this process use a shared `SteadyClock`."""
    clock = SteadyClock()
    for module in _STATES:
        setattr(importlib.import_module(module), _NAME, clock.now)
