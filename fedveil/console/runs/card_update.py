"""Rewrite an ended run's card with later findings, such as an audit."""

from __future__ import annotations

import json

from fedveil import strategies
from fedveil.attacks.audit import card_section
from fedveil.cards import collect
from fedveil.cards.card import DeclaredFacts, PrivacyCard
from fedveil.config import parse
from fedveil.console.runs.run_reader import RunView


def rewrite_card(run: RunView, stated: DeclaredFacts) -> PrivacyCard:
    """Replace the card in the run's final/ folder.

    Raises:
        StateError: audit.json is not a valid audit.
        ConfigError: the run's config is from another version.
        OSError: the card cannot be written.
    """
    file = run.folder / "id"
    recorded = collect.RecordedRun(
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
    card = collect.collect_card(
        recorded, parse(run.config["config"]), method, stated, card_section.card_audit_section(run.folder), whole=True
    )
    collect.write_card(run.folder / "final", card)
    return card
