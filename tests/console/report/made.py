"""Findings and audits by hand."""

from __future__ import annotations

import json
from pathlib import Path

from fedveil.attacks.findings import Audit, Finding, beside

Interval = tuple[float, float, float]


def found(model: str, auroc: float, verdict: str, attack: str = "alignment", half: float = 0.05) -> Finding:
    interval = (auroc, max(0.0, auroc - half), min(1.0, auroc + half))
    return Finding(model, attack, interval, interval, interval, 0.25, 40, 41, verdict, 0.01)


def controlled(*about: Finding, attack: str = "alignment", won: str = "above", lost: str = "contains") -> list[Finding]:
    """The findings with controls of `attack`: by default they hold."""
    return [
        found("overfitted FedAvg", 0.93, won, attack, 0.03),
        found("other rows", 0.52, lost, attack),
        found("site-0", 0.47, "contains", beside(attack)),
        *about,
    ]


def audited(run: Path, *about: Finding, **controls: str) -> Path:
    """Writes the audit of a run."""
    (run / "audit.json").write_text(json.dumps(Audit(controlled(*about, **controls), [], ["a note"]).to_json()))
    return run
