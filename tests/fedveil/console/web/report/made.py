"""Findings and audits by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from fedveil.attacks.audit.delong import NormalEstimate, RunDifference, SiteAuroc, SiteAveragedAuroc
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
    *aurocs: float, wrong: float | None = 0.5, error: float = 0.01, less: Sequence[tuple[Path, float]] = ()
) -> SiteAveragedAuroc:
    """The attack "alignment" at sites site-1, ..., and beside audited runs: (folder, by what the run reveals less)."""
    sites = [
        SiteAuroc(
            f"site-{i}", NormalEstimate(auroc, 2 * error),
            None if wrong is None else NormalEstimate(auroc - wrong, 2 * error), 64, 64,
        )
        for i, auroc in enumerate(aurocs, 1)
    ]  # fmt: skip
    digests = [(hashlib.sha256((base / "audit.json").read_bytes()).hexdigest(), value) for base, value in less]
    differences = [RunDifference(digest, NormalEstimate(value, error)) for digest, value in digests]
    return SiteAveragedAuroc("alignment", NormalEstimate(sum(aurocs) / len(aurocs), error), sites, differences)
