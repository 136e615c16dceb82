"""Read when the server last answered a site's heartbeat; only this time decides whether the site is "online".

The SuperNode sets the mtime of the file named by FEDVEIL_HEARTBEAT_FILE (fedveil/guard/heartbeat.py). This is
<state-dir>/NAME.heartbeat if `fedveil site start` started the SuperNode, and /tmp/heartbeat in a container, where the
health check reads it. This module does not import Flower.
"""

from __future__ import annotations

import time
from pathlib import Path

VARIABLE = "FEDVEIL_HEARTBEAT_FILE"
SUFFIX = ".heartbeat"
# Flower considers a site offline after two missed heartbeats, 30 s apart; this adds 15 s for transport.
SILENT_SECONDS = 75.0
_MOST_SITES = 20


def heartbeat_file(state: Path, site: str) -> Path:
    """Return the file whose modification time is the time of the site's last answered heartbeat."""
    return state.expanduser() / f"{site}{SUFFIX}"


def describe_sites(state: Path) -> dict[str, str]:
    """Describe, for each site in a state folder, by name, when the server last heard from it."""
    said = {}
    for file in sorted(state.expanduser().glob(f"*{SUFFIX}"))[:_MOST_SITES]:
        if answer := describe_answer(file):
            said[file.stem] = describe_silence(file) or answer
    return said


def describe_answer(file: Path) -> str:
    """Describe how long ago the last heartbeat was answered; return "" if none was recorded."""
    at = last_answer(file)
    return "" if at is None else f"heard by the server {max(0, round(time.time() - at))} s ago"


def last_answer(file: Path) -> float | None:
    """Return when the last heartbeat was answered, in seconds since 1970; None if none is recorded."""
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def describe_silence(file: Path, now: float | None = None) -> str:
    """Describe how long the server has not heard from a site.

    Return "" if the last heartbeat was answered recently or none was recorded: a site that exchanges messages as files
    sends no heartbeats.
    """
    at, now = last_answer(file), time.time() if now is None else now
    if at is None or now - at <= SILENT_SECONDS:
        return ""
    form = "%H:%M:%S" if now - at < 43_200 else "%Y-%m-%d %H:%M:%S"
    return f"not heard by the server since {time.strftime(form, time.localtime(at))}"
