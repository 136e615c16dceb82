"""The result of an audit, worded as `fedveil audit` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from fedveil.attacks.audit.findings import AttackFinding, AuditReport
from fedveil.attacks.audit.verdict import audit_verdict, strongest_findings
from fedveil.console.runs import audit_output
from fedveil.console.terminal import make_console

__all__ = ["AuditOutcome"]


@final
@dataclass(frozen=True)
class AuditOutcome:
    """An audit of a run.

    Attributes:
        folder: the run folder; audit.json is in it.
        report: every finding, with the controls.
    """

    folder: Path
    report: AuditReport

    @property
    def verdict(self) -> str:
        """Return the answer in one or two sentences, as `fedveil audit` prints it."""
        return audit_verdict(self.report.findings)

    @property
    def strongest(self) -> Sequence[AttackFinding]:
        """Return the findings on the run from attacks whose controls hold, highest AUROC first."""
        return strongest_findings(self.report.findings)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return every finding as a row: model, attack, kind, verdict, and AUROC with its 95 % interval."""
        return [
            {
                "model": f.model, "attack": f.attack, "kind": f.kind, "verdict": f.verdict,
                "auroc": f.auroc[0], "auroc_low": f.auroc[1], "auroc_high": f.auroc[2],
            }
            for f in self.report.findings
        ]  # fmt: skip

    def show(self) -> None:
        """Print the verdict, the notes and the strongest findings."""
        audit_output.print_audit(self.folder, self.report, self.folder.name, make_console())
