"""The comparisons in one file, and the table of all files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class FileCheck:
    """The comparisons in one file.

    Attributes:
        name: the file.
        recomputed: number of figures, interval ends and verdicts that were recomputed and compared.
        bounded: number of values that could only be compared with a bound, such as interval ends for which the file has
            only the seeds' part.
        verdicts: how many of these two are verdicts.
        mismatches: descriptions of the differences.
        unchecked: what could not be recomputed, and why.
    """

    name: str
    recomputed: int = 0
    bounded: int = 0
    verdicts: int = 0
    mismatches: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def compare(self, text: str, is_equal: bool) -> None:
        """Count a recomputed figure; record `text` if it differs."""
        self.recomputed += 1
        if not is_equal:
            self.mismatches.append(text)

    def bound(self, text: str, is_within: bool) -> None:
        """Count a bounded figure; record `text` if it is outside its bound."""
        self.bounded += 1
        if not is_within:
            self.mismatches.append(text)


def format_table(checks: Sequence[FileCheck]) -> str:
    """Return the table of all files, followed by the mismatches and by what could not be checked."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'file':{width}}  recomputed  bounded  verdicts  mismatches  not checked"]
    lines += [
        f"{c.name:{width}}  {c.recomputed:10,}  {c.bounded:7,}  {c.verdicts:8,}  {len(c.mismatches):10,}  "
        f"{len(c.unchecked):11,}"
        for c in checks
    ]
    totals = [sum(getattr(c, key) for c in checks) for key in ("recomputed", "bounded", "verdicts")]
    counts = [sum(len(getattr(c, key)) for c in checks) for key in ("mismatches", "unchecked")]
    lines.append(
        f"{len(checks)} files: {totals[0]:,} figures recomputed, {totals[1]:,} bounded, among them {totals[2]:,} "
        f"verdicts; {counts[0]:,} mismatches, {counts[1]:,} sentences or groups of figures not checked."
    )
    for heading, key in (("Mismatches", "mismatches"), ("Not checked", "unchecked")):
        notes = [f"  {c.name}: {text}" for c in checks for text in getattr(c, key)]
        lines += [f"{heading}:", *notes] if notes else []
    return "\n".join(lines) + "\n"
