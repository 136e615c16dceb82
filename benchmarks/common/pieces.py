"""Rows of a preset that runs in pieces: a case that the file of pieces has already is not run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedveil.benchmarks.run import commit


def row(pieces: Path | None, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of that name: the file's, or else what `measure` returns, which is kept there.

    A row has the commit that it was measured at, so that a table of several says so.
    """
    lines = pieces.read_text().splitlines() if pieces and pieces.exists() else []
    for found in map(json.loads, lines):
        if found["name"] == name:
            return dict(found)
    made = {"name": name, "commit": commit(), **measure()}
    if pieces:
        with pieces.open("a") as file:
            file.write(json.dumps(made) + "\n")
    return made
