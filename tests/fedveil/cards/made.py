"""Run records written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedveil import strategies
from fedveil.cards import collect
from fedveil.cards.card import AuditSection, DeclaredFacts, PrivacyCard
from fedveil.cards.collect import RecordedRun
from fedveil.config import parse
from fedveil.contract.method import hyperparameters_of

SITES = ("north", "south")
DP = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0, "dp.epsilon": 8.0, "train.batch-size": 8}


def messages(sites: tuple[str, ...] = SITES) -> list[dict[str, Any]]:
    """One upload of 100 bytes and one broadcast of 300 a site."""
    entries: list[dict[str, Any]] = []
    for site in sites:
        about = {"round": 0, "attempt": 0, "site": site}
        up = [["h.0.lora_A", "dense float32", [2, 3], 24]]
        down = [*up, ["h.0.lora_B", "dense float32", [3, 2], 24]]
        entries.append({**about, "direction": "up", "variant": "A", "kind": 1, "bytes": 100, "payload_bytes": 24,
                      "fields": up, "scalars": {"next": "B"}})  # fmt: skip
        entries.append({**about, "direction": "down", "variant": "", "kind": 0, "bytes": 300, "payload_bytes": 48,
                      "fields": down, "scalars": {}})  # fmt: skip
    return entries


def attempts(sites: tuple[str, ...] = SITES, rounds: int = 2, rows: int = 100, steps: int = 5) -> list[dict[str, Any]]:
    """Rounds in which all sites took part."""
    report = {"num_examples": rows, "steps": steps}
    return [
        {"round": r, "attempt": 0, "cohort": list(sites), "accepted": list(sites), "failed": {},
         "reports": dict.fromkeys(sites, report), "weights": "ab"}
        for r in range(rounds)
    ]  # fmt: skip


def card(folder: Path, whole: bool = False, audited: AuditSection | None = None, **changes: Any) -> PrivacyCard:
    """The card of a run; `changes`: keys of the run config, and fields of `RecordedRun`."""
    own = {name: changes.pop(name) for name in list(changes) if "." not in name}
    config = parse(changes)
    method = strategies.create_method(config.method.name, config.method.params)
    about = {
        "config": config.flat(),
        "method": {"name": config.method.name, "version": 1, "fields": hyperparameters_of(method)},
        "started": "2026-01-02T03:04:05+00:00", "fedveil": "0.2.0",
    }  # fmt: skip
    stated = own.pop("stated", DeclaredFacts())
    given: dict[str, Any] = {
        "folder": folder / "pilot", "id": "0a1b2c3d", "about": about, "attempts": attempts(), "messages": messages(),
        "rounds": 2, "scores": {"loss": 1.25}, "resumed": 0, **own,
    }  # fmt: skip
    return collect.collect_card(RecordedRun(**given), config, method, stated, audited or AuditSection(), whole)
