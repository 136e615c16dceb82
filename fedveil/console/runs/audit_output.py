"""Write an audit to its run folder, and print its verdict and strongest findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fedveil.console.terminal import say
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

if TYPE_CHECKING:  # they import torch
    from fedveil.attacks.audit.findings import AttackFinding, AuditReport

_SHOWN = 5  # findings shown on a terminal; the file has all
_NOT_TRIED = (
    "next: the lines above say why no attack was tried; set examples with --data or --site, and time with --minutes"
)
_CONTROLS_FAILED = (
    "next: the lines above say which control failed. If an attack failed on the overfitted control, use more examples "
    "(--max-rows); if members and non-members already differ, use other --non-members, more like the sites' examples"
)


def write_audit(folder: Path, result: AuditReport, sheet: bytes | None, console: Console | None = None) -> bool:
    """Write audit.json, and the sheet of reconstructed images if there is one, to the run folder.

    Returns:
        False if the audit tried no attack and an earlier audit is kept; `console` gets a line about it.
    """
    from fedveil.attacks.audit import findings

    if sheet is not None:
        write_atomic(folder / findings.PICTURES, sheet)
    file = folder / findings.FILE
    if not result.findings and result.epsilon_shown is None and file.is_file():
        if console:
            say(f"{file} is kept from an earlier audit, because this audit tried no attack")
        return False
    write_atomic(file, json.dumps(result.to_json(), indent=1).encode())
    return True


def print_audit(folder: Path, result: AuditReport, name: str, console: Console) -> None:
    """Print the verdict, notes and strongest findings of an audit of the run `name` in `folder`."""
    from fedveil.attacks.audit import findings
    from fedveil.attacks.audit.verdict import audit_verdict, strongest_findings

    say(sanitize(audit_verdict(result.findings), 2000))
    for note in result.notes:
        say(f"- {sanitize(note, 2000)}")
    if ordered := strongest_findings(result.findings)[:_SHOWN]:
        console.print(findings_table(ordered, name))
    if left := len(result.findings) - len(ordered):
        file = folder / findings.FILE
        say(f"The other {left} findings are in {file}; fedveil report {folder} plots them all")
    if not ordered:
        say(_CONTROLS_FAILED if result.findings else _NOT_TRIED)


def findings_table(found: Sequence[AttackFinding], name: str) -> Table:
    """Return the findings, one row each, narrow enough for any terminal."""
    listed = Table("model", "attack", title=f"{sanitize(name, 40)}: the strongest findings (95 %)")
    listed.add_column("AUROC", justify="right", no_wrap=True)
    listed.add_column("0.5", no_wrap=True)
    for f in found:
        listed.add_row(sanitize(f.model, 80), f.attack, _interval(f.auroc), f.verdict)
    return listed


def _interval(value: Sequence[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
