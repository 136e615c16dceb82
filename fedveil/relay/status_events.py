"""Status events that one end of a relay reports to its users: one line per letter, in a new file after each start.

    {"what": "answered", "words": "order-...relay: answered: reply-...relay"}

The SuperNode's process uses this file to inform the command that started it. Permanent records are in each
end's log.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from fedveil.records.atomic_files import append_line
from fedveil.sanitize import sanitize

NAME = "said.jsonl"
IDLE = "idle"  # every file in the folder has been accepted or refused
BAD = ("refused", "failed")
_LONGEST = 1000  # characters

log = logging.getLogger("flwr")  # the log of Flower's SuperNode process


@dataclass(frozen=True)
class StatusEvents:
    """Writer of status events."""

    file: Path

    def say(self, what: str, words: str = "") -> None:
        """Write one event, and one line to the process's log."""
        words = sanitize(words, _LONGEST)
        if words:
            log.info("relay: %s: %s", what, words)
        append_line(self.file, {"what": what, "words": words})


def read_events(file: Path, start: int) -> tuple[list[tuple[str, str]], int]:
    """Return the complete lines starting at byte `start` as (what, words), and the offset after them."""
    if not file.exists():
        return [], start
    with file.open("rb") as opened:
        opened.seek(start)
        data = opened.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [(line["what"], line["words"]) for line in map(json.loads, whole.splitlines())], start + len(whole)
