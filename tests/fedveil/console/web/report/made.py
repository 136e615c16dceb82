"""Findings and audits by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from fedveil.attacks.audit.delong import SiteAveragedAuroc
from fedveil.attacks.audit.findings import AttackFinding, AuditReport, control_name

Interval = tuple[float, float, float]


def found(model: str, auroc: float, verdict: str, attack: str = "alignment", half: float = 0.05) -> AttackFinding:
    interval = (auroc, max(0.0, auroc - half), min(1.0, auroc + half))
    return AttackFinding(model, attack, interval, interval, interval, 0.25, 40, 41, verdict, 0.01)


def controlled(
    *about: AttackFinding, attack: str = "alignment", won: str = "above", lost: str = "contains"
) -> list[AttackFinding]:
    """The findings with controls of `attack`: by default they hold."""
    return [
        found("overfitted FedAvg", 0.93, won, attack, 0.03),
        found("other rows", 0.52, lost, attack),
        found("site-0", 0.47, "contains", control_name(attack)),
        *about,
    ]


def audited(run: Path, *about: AttackFinding, across: Sequence[SiteAveragedAuroc] = (), **controls: str) -> Path:
    """Writes the audit of a run."""
    audit = AuditReport(controlled(*about, **controls), [], ["a note"], across=across)
    (run / "audit.json").write_text(json.dumps(audit.to_json()))
    return run


def over_sites(
    auroc: float, base: Path | None = None, less: float = 0.0, p: float = 1.0, half: float = 0.04
) -> SiteAveragedAuroc:
    """An attack over three sites, beside the audited run in the folder `base`."""
    digest = hashlib.sha256((base / "audit.json").read_bytes()).hexdigest() if base else ""
    interval = (less, less - half, less + half)
    return SiteAveragedAuroc("alignment", 3, (auroc, auroc - half, auroc + half), digest, interval, p)
