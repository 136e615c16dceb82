"""Rows of a preset that runs in pieces: rows already in the pieces file are not measured again.

Several processes can share one file: each works on rows that no other process is working on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedveil_bench.provenance import measured_commit

_DIGITS = 14  # hexadecimal digits of a name's lock position: a file offset has 63 bits


def measure_row(pieces: Path | None, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row with this name, from the file if it is there; otherwise measure it and store the result there.

    A row contains the commit at which it was measured, so that a table can show if it mixes several commits.
    """
    for found in read_pieces(pieces):
        if found["name"] == name:
            return found
    made = {"name": name, "commit": measured_commit(), **measure()}
    append_piece(pieces, made)
    return made


def measure_rows(
    pieces: Path | None, measures: Mapping[str, Callable[[], dict[str, Any]]], minutes: float | None = None
) -> list[dict[str, Any]]:
    """Return the rows with these names, in order, as from `measure_row`.

    Rows that another process is still measuring, or that were not started within the time limit, are omitted.
    """
    began, made = time.monotonic(), dict[str, dict[str, Any]]()
    for name, measure in measures.items():
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            break
        with lock_piece(pieces, _place(name)) as mine:
            if mine:
                made[name] = measure_row(pieces, name, measure)
    made |= {found["name"]: found for found in read_pieces(pieces)}
    return [made[name] for name in measures if name in made]


@contextlib.contextmanager
def lock_piece(pieces: Path | None, number: int) -> Iterator[bool]:
    """Lock the piece with this number; yield whether this process got it. A process may hold one lock at a time."""
    if pieces is None:
        yield True
        return
    pieces.parent.mkdir(parents=True, exist_ok=True)
    with pieces.with_suffix(".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            yield False
            return
        yield True


def read_pieces(pieces: Path | None) -> list[dict[str, Any]]:
    """Return the parsed lines of the file."""
    lines = pieces.read_text().splitlines() if pieces and pieces.exists() else []
    return [dict(json.loads(line)) for line in lines]


def append_piece(pieces: Path | None, made: Mapping[str, Any]) -> None:
    """Append a line to the file."""
    if pieces:
        with pieces.open("a") as file:
            file.write(json.dumps(made) + "\n")


def _place(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:_DIGITS], 16)
