"""Puts a card beside a model: privacy.json, PRIVACY.md and README.md, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from fedveil.cards import hub, words
from fedveil.cards.card import NAME, PAGE, README, Card
from fedveil.records import files


def write(folder: Path, card: Card) -> None:
    """Writes the three files of the card to the model's folder. Raises OSError, for example on a full disk."""
    names = {file.name for file in folder.iterdir()}
    texts = {NAME: card.to_bytes(), PAGE: words.page(card).encode(), README: hub.page(card, names).encode()}
    with files.filled(folder) as scratch:
        for name, data in texts.items():
            (scratch / name).write_bytes(data)
