"""A site's scores on held-out examples, which it never trains on, or its refusal to report them.

    loss_held_out       mean loss of the received weights, like a task's `loss`
    rows_held_out       number of examples behind it, at least LEAST_ROWS
    held_out_refused    instead of the other two: a key of REFUSALS

A site that refuses still takes part in the round. The server only ever sees sentences from this file,
never a site's own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "CHANGED",
    "FIELDS",
    "LEAST_ROWS",
    "LOSS",
    "NOT_FINITE",
    "NOT_PERMITTED",
    "NO_SCORE",
    "OTHER_PART",
    "REFUSALS",
    "REFUSED",
    "ROWS",
    "SPENT",
    "TOO_FEW",
    "find_fault",
    "held_out_metrics",
]

LEAST_ROWS: Final = 64  # the mean loss over fewer examples reveals more about each one
LOSS, ROWS, REFUSED = "loss_held_out", "rows_held_out", "held_out_refused"
FIELDS: Final = frozenset({LOSS, ROWS, REFUSED})

NOT_PERMITTED, TOO_FEW, SPENT, NO_SCORE, NOT_FINITE, OTHER_PART, CHANGED = 1, 2, 3, 4, 5, 6, 7
REFUSALS: Final[Mapping[int, str]] = {
    NOT_PERMITTED: "its policy permits no scores of held-out examples (max-scores)",
    TOO_FEW: f"fewer than {LEAST_ROWS} of its examples would be held out; it trains on all of them",
    SPENT: "it has reported as many scores in this run as its policy permits (max-scores)",
    NO_SCORE: "its task cannot compute the loss of single examples",
    NOT_FINITE: "the loss is not finite",
    OTHER_PART: "an earlier run made it hold out a different part of these examples (evaluate.held-out)",
    CHANGED: "the examples that it holds out are no longer those of an earlier run",
}


def held_out_metrics(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a report that concern held-out examples."""
    return {name: report[name] for name in sorted(FIELDS & set(report))}


def find_fault(report: Mapping[str, Any], most: int) -> str:
    """Return the problem with a possibly forged report as "expected ..., found ...", or "" if there is none.

    `most` is the largest number of examples that a site may claim.
    """
    metrics = held_out_metrics(report)
    if not metrics:
        return ""
    if set(metrics) == {REFUSED}:
        known = metrics[REFUSED] in REFUSALS
        return "" if known else f"{REFUSED}: expected one of {sorted(REFUSALS)}, found {metrics[REFUSED]!r}"
    if set(metrics) != {LOSS, ROWS}:
        return f"{LOSS}: a report has it with {ROWS}, or has {REFUSED} alone; found {', '.join(metrics)}"
    rows = metrics[ROWS]
    if rows != int(rows) or not LEAST_ROWS <= rows <= most:
        return f"{ROWS}: expected a whole number from {LEAST_ROWS} to {most}, found {rows!r}"
    return ""
