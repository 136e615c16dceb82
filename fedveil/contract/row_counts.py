"""Counts of truncated and dropped rows in a site's data, which the site may report along with its upload.

    read_rows       rows that the run selects from the site's data
    cut_rows        of these, rows that were truncated because they have too many tokens
    dropped_rows    of these, rows that were dropped because a text is missing or empty

The counts depend on the rows' content. So they stay at the site in a run with a privacy guarantee, under secure
aggregation, and if the site's policy does not permit them (report-row-counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["FIELDS", "RowCounts", "find_fault"]

FIELDS: Final = frozenset({"read_rows", "cut_rows", "dropped_rows"})


@dataclass(frozen=True)
class RowCounts:
    """One site's counts; see the module docstring."""

    read_rows: int
    cut_rows: int
    dropped_rows: int

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> RowCounts | None:
        """Return the counts in a report that `find_fault` has accepted, or None if the report has none."""
        return cls(**{name: int(report[name]) for name in FIELDS}) if report.keys() >= FIELDS else None

    def to_report(self) -> dict[str, float]:
        """Return the counts as entries of a report."""
        return {name: float(count) for name, count in asdict(self).items()}

    @property
    def words(self) -> str:
        """Return the counts as text, such as "1,028 of 1,201 rows cut (85.6 %), 3 left out as empty"."""
        share = 100 * self.cut_rows / max(1, self.read_rows)
        return (
            f"{self.cut_rows:,} of {self.read_rows:,} rows cut ({share:.1f} %), {self.dropped_rows:,} left out as empty"
        )

    @property
    def is_whole(self) -> bool:
        """Return whether no row was truncated or dropped."""
        return not self.cut_rows and not self.dropped_rows


def find_fault(report: Mapping[str, Any], most: int) -> str:
    """Return the problem with a possibly forged report as "expected ..., found ...", or "" if there is none.

    `most` is the largest number of rows that a site may claim.
    """
    counts = {name: report[name] for name in sorted(FIELDS & set(report))}
    if not counts:
        return ""
    if set(counts) != FIELDS:
        return f"read_rows: it must come with cut_rows and dropped_rows; found {', '.join(counts)}"
    for name, value in counts.items():
        if value != int(value) or not 0 <= value <= most:
            return f"{name}: expected a whole number from 0 to {most}, found {value!r}"
    if counts["cut_rows"] + counts["dropped_rows"] > counts["read_rows"]:
        return f"read_rows: expected at least cut_rows + dropped_rows, found {counts['read_rows']!r}"
    return ""
