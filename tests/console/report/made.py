"""Findings and audits by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from fedveil.attacks.findings import Audit, Finding, beside
from fedveil.attacks.paired import Across

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


def audited(run: Path, *about: Finding, across: Sequence[Across] = (), **controls: str) -> Path:
    """Writes the audit of a run."""
    audit = Audit(controlled(*about, **controls), [], ["a note"], across=across)
    (run / "audit.json").write_text(json.dumps(audit.to_json()))
    return run


def over_sites(auroc: float, base: Path | None = None, less: float = 0.0, p: float = 1.0, half: float = 0.04) -> Across:
    """An attack over three sites, beside the audited run in the folder `base`."""
    digest = hashlib.sha256((base / "audit.json").read_bytes()).hexdigest() if base else ""
    interval = (less, less - half, less + half)
    return Across("alignment", 3, (auroc, auroc - half, auroc + half), digest, interval, p)
