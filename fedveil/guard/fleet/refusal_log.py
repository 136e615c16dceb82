"""Write refused calls to the control log: often enough to be noticed, rarely enough not to fill the disk.

    {"event": "fleet-refused", "site": "east", "node": "49..", "call": "push_messages", "reason": "...", "count": 1}
    {"event": "rogue", "site": "east", "node": "49..", "count": 20}

| a site's refused calls | lines |
|---|---|
| the first for a call and reason | one at once, with the value that the site sent, truncated to 80 characters |
| more of them within a minute | none at first; then one with their number, at the next refusal or the next sweep |
| 20 within a minute, for any calls | one `rogue` event, once a minute |
| those that the server causes: the reply is late or was dropped here, or the disk failed | not counted in the 20 |
| while the control log is not writable | a line in the SuperLink's own log; the call stays refused |

A reason is one of the fixed texts in refusal.py, so a site cannot influence the number of kinds of lines. The operator
decides whether to revoke a site with a `rogue` event: `fedveil members revoke`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from logging import ERROR

from flwr.supercore import log

from fedveil.errors import StateError
from fedveil.guard import fleet_limits as limits
from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet.refusal import RefusalReason
from fedveil.sanitize import sanitize

_VALUE_CHARACTERS = 80


@dataclass
class _Line:
    """The time of the last line of one kind, and the number of refusals since then."""

    at: float
    unlogged: int = 0


class FleetRefusalLog:
    """Writer for the lines about refused calls in the control log."""

    def __init__(self, control: ControlLog, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._control, self._monotonic = control, monotonic
        self._lines: dict[tuple[str, int, str, RefusalReason], _Line] = {}
        self._recent: dict[int, deque[float]] = {}
        self._rogues: dict[int, float] = {}
        self._lock = threading.Lock()

    def record_refusal(self, site: str, node_id: int, call: str, reason: RefusalReason, value: str) -> None:
        """Count a refusal, and write the lines that are due."""
        with self._lock:
            now = self._monotonic()
            key = site, node_id, call, reason
            line = self._lines.get(key)
            if line is None or now - line.at >= limits.REFUSAL_LINE_SECONDS:
                about = {"value": sanitize(value, _VALUE_CHARACTERS)} if line is None and value else {}
                self._write(key, 1 + (line.unlogged if line else 0), about)
                self._lines[key] = _Line(now)
            else:
                line.unlogged += 1
            if not reason.can_be_honest:
                self._record_rogue(site, node_id, now)

    def write_counts(self) -> None:
        """Write the refusal counts that are not yet in the log and whose minute is over."""
        with self._lock:
            now = self._monotonic()
            for key, line in self._lines.items():
                if line.unlogged and now - line.at >= limits.REFUSAL_LINE_SECONDS:
                    self._write(key, line.unlogged, {})
                    line.at, line.unlogged = now, 0

    def _record_rogue(self, site: str, node_id: int, now: float) -> None:
        recent = self._recent.setdefault(node_id, deque(maxlen=limits.ROGUE_REFUSALS_A_MINUTE))
        recent.append(now)
        is_rogue = len(recent) == recent.maxlen and now - recent[0] < limits.REFUSAL_LINE_SECONDS
        if is_rogue and now - self._rogues.get(node_id, -limits.REFUSAL_LINE_SECONDS) >= limits.REFUSAL_LINE_SECONDS:
            self._rogues[node_id] = now
            self._append("rogue", {"site": site, "node": str(node_id), "count": len(recent)})

    def _write(self, key: tuple[str, int, str, RefusalReason], count: int, more: dict[str, str]) -> None:
        site, node_id, call, reason = key
        about = {"site": site, "node": str(node_id), "call": call, "reason": reason.value, "count": count}
        self._append("fleet-refused", {**about, **more})

    def _append(self, event: str, about: dict[str, object]) -> None:
        try:
            self._control.write(event, about)
        except StateError as error:  # the call stays refused, and the operator sees that the log is broken
            log(ERROR, "%s of %s could not be written to the control log: %s", event, about["site"], error)
