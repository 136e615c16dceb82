"""What `fedveil audit` found of a run, for its card: each attack with both kinds of controls, or "not measured"."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedveil.attacks import findings, verdict
from fedveil.attacks.findings import Finding
from fedveil.cards.card import Attack, Audited, Score, short, text
from fedveil.errors import StateError
from fedveil.foreign import shown

_MOST_BYTES = 16 << 20


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    findings: list[Finding]
    notes: list[str]


_FILE = TypeAdapter(_File)


def of(run: Path) -> Audited:
    """The findings about the run in a folder. Raises StateError where audit.json is none."""
    file = run / findings.FILE
    if not file.is_file():
        return Audited()
    with file.open("rb") as lines:
        data = lines.read(_MOST_BYTES + 1)
    try:
        found = _FILE.validate_json(data[:_MOST_BYTES])
        names = dict.fromkeys(f.attack for f in found.findings if not findings.is_beside(f.attack))
        attacks = [_attack(name, found.findings, found.notes) for name in names]
        notes = [text(note) for note in found.notes]
    except (ValidationError, RecursionError) as error:
        raise StateError(
            f"{file}: expected what fedveil audit writes, found {shown(error, 200)}; audit the run again"
        ) from None
    return Audited(measured=bool(attacks), audit=hashlib.sha256(data).hexdigest(), attacks=attacks, notes=notes)


def _attack(name: str, found: Sequence[Finding], notes: Sequence[str]) -> Attack:
    reasons = verdict.unusable(found, name)
    own = [f for f in found if f.attack in (name, findings.beside(name))]
    why = next((note for note in notes if note.startswith(f"{name}: ")), "; ".join(reasons) or "Its controls hold.")

    def of_kind(kind: str) -> list[Score]:
        return [_score(f) for f in own if f.kind == kind]

    return Attack(
        name=short(name),
        usable=not reasons,
        why=text(why),
        run=of_kind("about the run"),
        to_win=of_kind("to win"),
        to_lose=of_kind("to lose"),
    )


def _score(f: Finding) -> Score:
    return Score(
        model=short(f.model),
        auroc=f.auroc,
        tpr_at_01=f.tpr_at_01,
        epsilon_at_least=f.epsilon_bound,
        members=f.members,
        non_members=f.non_members,
        verdict=f.verdict,  # type: ignore[arg-type]  # checked there
    )
