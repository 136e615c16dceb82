"""Count the calls by each site that the fleet port refused in the last 24 hours, from the end of the control log.

fedveil/guard/fleet/refusal_log.py writes these lines. `fedveil log verify` checks the whole log's
chain; for speed, only its last 4 MiB are read here, and unreadable lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedveil.sanitize import sanitize

CONTROL_LOG = Path("server", "control-log.jsonl")
_TAIL_BYTES = 4 << 20
_HOURS = 24
_MOST_COUNT = 1_000_000_000


@dataclass(frozen=True)
class RefusedCalls:
    """One site's refused calls in the last 24 hours.

    Attributes:
        count: their number.
        last: time and reason of the last one, for display.
        is_rogue: 20 or more came within a minute.
    """

    count: int = 0
    last: str = ""
    is_rogue: bool = False

    def __str__(self) -> str:
        calls = "1 call" if self.count == 1 else f"{self.count:,} calls"
        text = f"{calls} refused in the last {_HOURS} h"
        text += f", most recently at {self.last}" if self.last else ""
        return f"{text}; ROGUE: 20 within a minute; fedveil members revoke shuts it out" if self.is_rogue else text


def read_refused_calls(folder: Path, now: datetime | None = None) -> dict[str, RefusedCalls]:
    """Return the refused calls by site for the federation in `folder`; {} if it has no log yet.

    Raises:
        OSError: the log cannot be read.
    """
    since = (now or datetime.now(UTC)) - timedelta(hours=_HOURS)
    calls: dict[str, RefusedCalls] = {}
    for line in _read_tail(folder / CONTROL_LOG):
        event, at = line.get("event"), _parse_time(line.get("time"))
        if event not in ("fleet-refused", "rogue") or at is None or at < since:
            continue
        site = sanitize(str(line.get("site", "")), 64)
        before, count = calls.get(site, RefusedCalls()), line.get("count")
        if event == "rogue":
            calls[site] = replace(before, is_rogue=True)
        elif type(count) is int and 0 < count <= _MOST_COUNT:
            reason = sanitize(str(line.get("reason", "")), 200)
            calls[site] = replace(before, count=before.count + count, last=f"{at:%H:%M} UTC ({reason})")
    return calls


def _read_tail(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the log's last lines that are JSON objects, oldest first."""
    try:
        with file.open("rb") as log:
            begin = max(0, log.seek(0, 2) - _TAIL_BYTES)
            log.seek(begin)
            lines = log.read(_TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return
    for line in lines[1 if begin else 0 :]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _parse_time(text: object) -> datetime | None:
    """Return a line's time; None for text that is not a time."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
