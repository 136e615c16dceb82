"""What an end of a relay tells the people before it: a line a letter, in a file that is new at each start.

    {"what": "answered", "words": "order-...relay: answered: reply-...relay"}

The file is how the SuperNode's process tells the command that started it; what must last stands in the end's log.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from fedveil.foreign import shown
from fedveil.records.files import append_line

NAME = "said.jsonl"
IDLE = "idle"  # everything that lay in the folder has been judged
BAD = ("refused", "failed")
_LONGEST = 1000  # characters

log = logging.getLogger("flwr")  # of the process that Flower's SuperNode is


@dataclass(frozen=True)
class Said:
    """Where it is written."""

    file: Path

    def say(self, what: str, words: str = "") -> None:
        """One line, and one in the process's log."""
        words = shown(words, _LONGEST)
        if words:
            log.info("relay: %s: %s", what, words)
        append_line(self.file, {"what": what, "words": words})


def read(file: Path, start: int) -> tuple[list[tuple[str, str]], int]:
    """The whole lines from byte `start` on, as (what, words), and where they end."""
    if not file.exists():
        return [], start
    with file.open("rb") as opened:
        opened.seek(start)
        data = opened.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [(line["what"], line["words"]) for line in map(json.loads, whole.splitlines())], start + len(whole)
