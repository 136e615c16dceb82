"""What a site says of received weights on rows that it holds out and never trains on, and why it says nothing.

    loss_held_out       mean loss, as a task's `loss` is
    rows_held_out       rows behind it, at least LEAST_ROWS
    held_out_refused    in the place of both: a key of REFUSALS

A site that refuses takes part in the round all the same. A server learns words of this file alone, never a site's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LEAST_ROWS: Final = 64  # the mean loss of fewer rows tells more of each
LOSS, ROWS, REFUSED = "loss_held_out", "rows_held_out", "held_out_refused"
FIELDS: Final = frozenset({LOSS, ROWS, REFUSED})

NOT_PERMITTED, TOO_FEW, SPENT, NO_SCORE, NOT_FINITE = 1, 2, 3, 4, 5
REFUSALS: Final[Mapping[int, str]] = {
    NOT_PERMITTED: "its policy permits no scores of held-out rows (max-scores)",
    TOO_FEW: f"fewer than {LEAST_ROWS} of its rows would be held out; it trains on all of them",
    SPENT: "it has given as many scores in this run as its policy permits (max-scores)",
    NO_SCORE: "its task has no loss of given rows",
    NOT_FINITE: "the loss is not finite",
}


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that is of held-out rows."""
    return {name: report[name] for name in sorted(FIELDS & set(report))}


def fault(report: Mapping[str, Any], most: int) -> str:
    """What is wrong with such a part, which a site may have made up: "expected ..., found ..."; "" = nothing.

    `most`: rows that a site may claim.
    """
    found = figures(report)
    if not found:
        return ""
    if set(found) == {REFUSED}:
        known = found[REFUSED] in REFUSALS
        return "" if known else f"{REFUSED}: expected one of {sorted(REFUSALS)}, found {found[REFUSED]!r}"
    if set(found) != {LOSS, ROWS}:
        return f"{LOSS}: expected it with {ROWS} or {REFUSED} alone, found {', '.join(found)}"
    rows = found[ROWS]
    if rows != int(rows) or not LEAST_ROWS <= rows <= most:
        return f"{ROWS}: expected a whole number from {LEAST_ROWS} to {most}, found {rows!r}"
    return ""
