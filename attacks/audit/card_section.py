"""Build the privacy card's audit section: each attack with both kinds of controls, or "not measured"."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedveil.attacks.audit import findings, verdict
from fedveil.attacks.audit.findings import AttackFinding
from fedveil.cards.card import AttackEntry, AttackScore, AuditSection, card_text, short_digest
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

_MOST_BYTES = 16 << 20


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    findings: list[AttackFinding]
    notes: list[str]


_FILE = TypeAdapter(_File)


def card_audit_section(run: Path) -> AuditSection:
    """Return the findings about the run in a folder. Raises StateError if audit.json is invalid."""
    file = run / findings.FILE
    if not file.is_file():
        return AuditSection()
    with file.open("rb") as lines:
        data = lines.read(_MOST_BYTES + 1)
    try:
        report = _FILE.validate_json(data[:_MOST_BYTES])
        names = dict.fromkeys(f.attack for f in report.findings if not findings.is_control_name(f.attack))
        attacks = [_attack(name, report.findings, report.notes) for name in names]
        notes = [card_text(note) for note in report.notes]
    except (ValidationError, RecursionError) as error:
        raise StateError(
            f"{file}: not a valid output of fedveil audit ({sanitize(error, 200)}); audit the run again"
        ) from None
    return AuditSection(measured=bool(attacks), audit=hashlib.sha256(data).hexdigest(), attacks=attacks, notes=notes)


def _attack(name: str, found: Sequence[AttackFinding], notes: Sequence[str]) -> AttackEntry:
    reasons = verdict.explain_unusable(found, name)
    own = [f for f in found if f.attack in (name, findings.control_name(name))]
    why = next((note for note in notes if note.startswith(f"{name}: ")), "; ".join(reasons) or "Its controls hold.")

    def of_kind(kind: str) -> list[AttackScore]:
        return [_score(f) for f in own if f.kind == kind]

    return AttackEntry(
        name=short_digest(name),
        usable=not reasons,
        why=card_text(why),
        run=of_kind("about the run"),
        to_win=of_kind("to win"),
        to_lose=of_kind("to lose"),
    )


def _score(f: AttackFinding) -> AttackScore:
    return AttackScore(
        model=short_digest(f.model),
        auroc=f.auroc,
        tpr_at_01=f.tpr_at_01,
        epsilon_at_least=f.epsilon_bound,
        members=f.members,
        non_members=f.non_members,
        verdict=f.verdict,  # type: ignore[arg-type]  # checked there
    )
