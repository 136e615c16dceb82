"""The card of a run that has ended, made again with what was learned since, such as an audit."""

from __future__ import annotations

import json

from fedveil import strategies
from fedveil.cards import gathered, written
from fedveil.cards.card import Card, Stated
from fedveil.config import parse
from fedveil.console.cards import audited
from fedveil.console.runs.folder import Run


def write(run: Run, stated: Stated) -> Card:
    """Puts the card into the run's final/, in the place of the one that is there.

    Raises:
        StateError: an audit.json that is none.
        ConfigError: its config is not one of this version.
        OSError: it cannot be written.
    """
    file = run.folder / "id"
    recorded = gathered.Recorded(
        folder=run.folder,
        id=file.read_text(errors="replace").partition(" ")[0][:8] if file.is_file() else "",
        about=run.config,
        attempts=run.attempts,
        messages=run.messages,
        rounds=run.rounds_done,
        scores=run.final,
        resumed=len(run.resumes),
    )
    method = strategies.create_from_json(run.method, json.dumps(run.config["method"]["fields"]))
    found = gathered.card(recorded, parse(run.config["config"]), method, stated, audited.of(run.folder), whole=True)
    written.write(run.folder / "final", found)
    return found
