"""The server's log of control-port calls and of rejected site keys (records/audit_log.py).

| event | content |
|---|---|
| asked | operator, role, call, its subject (run, app, node, key), peer; permitted, or refused and why |
| submitted | the run created by a permitted start-run, or the HTTP status that Flower returned |
| shut-out | a site whose key has expired or was revoked or replaced; once per start of the program |
| fleet-refused | site, node, call, reason and count of calls at the sites' port (fedveil/guard/fleet/refusal_log.py) |
| rogue | a site that made 20 refused calls, of a kind that no honest site sends, within a minute |
| unchecked | the program was started without the checks on sites' messages |

The server does not carry out a call that it cannot log. At most 60 refusals per minute get their own line; the next
line reports how many more there were, so that strangers cannot fill the disk. Each line has the program's clock time
(`clock`). The next start continues from that time, so setting the machine's clock back does not make a key valid again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.errors import StateError
from fedveil.guard.registry_files import MonotonicClock, format_time
from fedveil.records import audit_log

_REFUSALS_A_MINUTE = 60


class ControlLog:
    """The log in `file` and its clock. Raises StateError if the log is incomplete or was tampered with."""

    def __init__(self, file: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        last = audit_log.last_entry(file)
        try:
            times = [format_time(last[key]) for key in ("time", "clock") if key in last]
        except (ValueError, TypeError) as error:
            raise StateError(
                f"{file}, last line: it has no valid time ({error}); move the log away and keep it"
            ) from None
        self.clock = MonotonicClock(max(times, default=datetime.fromtimestamp(0, UTC)))
        self._monotonic, self._minute, self._refused, self._unsaid = monotonic, monotonic(), 0, 0
        self._lock = threading.Lock()

    def write(self, event: str, about: Mapping[str, Any]) -> None:
        """Write one line and flush it to disk. Raises StateError."""
        with self._lock:
            more = {"unsaid": self._unsaid} if self._unsaid else {}
            audit_log.append_entry(self.file, event, {**about, **more, "clock": self.clock.now().isoformat()})
            self._unsaid = 0

    def refused(self, about: Mapping[str, Any]) -> None:
        """Log a refusal, or only count it. Raises StateError."""
        with self._lock:
            if self._monotonic() - self._minute >= 60.0:
                self._minute, self._refused = self._monotonic(), 0
            self._refused += 1
            if self._refused > _REFUSALS_A_MINUTE:
                self._unsaid += 1
                return
        self.write("asked", {**about, "decision": "refused"})
