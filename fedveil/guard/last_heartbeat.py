"""Read when the server last answered a site's heartbeat, which alone decides whether the site is "online".

The SuperNode sets the time of the file that FEDVEIL_HEARTBEAT_FILE names (fedveil/guard/heartbeat.py), which is
<state-dir>/NAME.heartbeat where `fedveil site start` has started it. It imports nothing of Flower.
"""

from __future__ import annotations

import time
from pathlib import Path

VARIABLE = "FEDVEIL_HEARTBEAT_FILE"
SUFFIX = ".heartbeat"
# Flower calls a site offline once two heartbeats, 30 s apart, are missing; a quarter of a minute more for the way.
SILENT_SECONDS = 75.0
_MOST_SITES = 20


def heartbeat_file(state: Path, site: str) -> Path:
    """Return the file whose modification time is that of the site's last answered heartbeat."""
    return state.expanduser() / f"{site}{SUFFIX}"


def describe_sites(state: Path) -> dict[str, str]:
    """Say of each site of a state folder that noted heartbeats when the server heard it last, by its name."""
    said = {}
    for file in sorted(state.expanduser().glob(f"*{SUFFIX}"))[:_MOST_SITES]:
        if (at := last_answer(file)) is not None:
            said[file.stem] = describe_silence(file) or f"heard by the server {max(0, round(time.time() - at))} s ago"
    return said


def last_answer(file: Path) -> float | None:
    """Return when the last heartbeat was answered, in seconds since 1970; None if none was, or none is recorded."""
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def describe_silence(file: Path, now: float | None = None) -> str:
    """Describe since when the server has not heard a site; "" if its last heartbeat was answered recently or none was
    recorded: a site that exchanges files sends none."""
    at, now = last_answer(file), time.time() if now is None else now
    if at is None or now - at <= SILENT_SECONDS:
        return ""
    form = "%H:%M:%S" if now - at < 43_200 else "%Y-%m-%d %H:%M:%S"
    return f"not heard by the server since {time.strftime(form, time.localtime(at))}"
