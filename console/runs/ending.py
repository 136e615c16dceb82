"""Waits for the end of a run, and says as an exit code what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fedveil.foreign import shown

_POLL_SECONDS = 0.5
_ASK_SECONDS = 10.0  # a question to Flower costs a CPU-second
_REASON_CHARACTERS = 2000  # its end is the command that resumes the run
_BY_FLOWER = {"finished:completed": 0, "finished:failed": 1, "finished:stopped": 3}


def until_ended(
    read: Callable[[], dict[str, Any]],
    ask: Callable[[], str],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[int, str]:
    """The exit code (0 completed, 1 failed, 3 stopped, 4 still going), and why in words.

    Args:
        read: status.json, {} where there is none.
        ask: what Flower says of the run, "" where it cannot be asked.
        timeout: seconds; 0 = none.
    """
    started, asked = clock(), clock() - _ASK_SECONDS
    status: dict[str, Any] = {}
    while True:
        status = read()
        if (state := status.get("state")) in ("completed", "failed"):
            return int(state == "failed"), f"{state} {_why(status)}".strip()
        died = status.get("state") == "died"
        if died or clock() - asked >= _ASK_SECONDS:
            said, asked = ask(), clock()
            if said.startswith("finished"):
                status = read()  # its last word may have come in between
                if status.get("state") in ("completed", "failed"):
                    continue
                if status and not died and said == "finished:completed":
                    return 1, "failed: Flower has finished it, and its own status.json does not say that it completed"
                words = f"{shown(said.partition(':')[2], 40)}: so says Flower; flwr log has what it printed"
                if not died or said == "finished:stopped":
                    return _BY_FLOWER.get(said, 1), words
        if died:
            return 1, f"died: {_why(status)}"
        if timeout and clock() - started >= timeout:
            about = {key: value for key, value in status.items() if key != "process"}
            return 4, f"still going after {timeout:g} s: {shown(about or 'no status yet')}"
        sleep(_POLL_SECONDS)


def _why(status: dict[str, Any]) -> str:
    return shown(status.get("reason") or "", _REASON_CHARACTERS)
