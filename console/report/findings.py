"""The part of the report that says what attacks found: audit.json, as `fedveil audit` wrote it."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from fedveil.attacks import base, findings
from fedveil.console.report.page import Html, bullets, join, table, tag
from fedveil.errors import StateError

NOTE = (
    "AUROC 0.5 is guessing, 1 is certainty; intervals of 95 % by bootstrap over the rows. Every attack stands beside "
    "the overfitted control, which it must win, and round 0, which it must lose. One interval in twenty leaves 0.5 "
    "out by chance."
)
_MUST: dict[str, tuple[str, ...]] = {base.ROUND_0: ("contains",), base.OVERFITTED: ("above",)}


def html(run: Path) -> Html | None:
    """The findings about the run in that folder; None where it was not audited."""
    file = run / findings.FILE
    if not file.is_file():
        return None
    try:
        audit: dict[str, Any] = json.loads(file.read_text())
        rows = [_row(finding) for finding in audit["findings"]]
        rebuilt = [[r["site"], f"{100 * r['coverage']:.0f} %", r["staleness"]] for r in audit["rebuilt"]]
        notes = [str(note) for note in audit["notes"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file}: expected what fedveil audit writes, found {error!r}; audit the run again") from None
    head = [
        "model",
        "attack",
        "AUROC",
        "TPR at 1 % FPR",
        "TPR at 0.1 % FPR",
        "epsilon at least",
        "members",
        "non-members",
    ]
    parts = [bullets(notes), table([*head, "against 0.5"], rows)]
    if rebuilt:
        parts += [
            tag("p", "What the server could rebuild of each site, from what the site sent:", "note"),
            table(["site", "tensors seen", "participations between them"], rebuilt),
        ]
    if (sheet := pictures(run)) is not None:
        parts.append(sheet)
    return join(parts)


def pictures(run: Path) -> Html | None:
    """The sheet of rebuilt pictures of the run in that folder; None where there is none."""
    file = run / findings.PICTURES
    if not file.is_file():
        return None
    source = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    caption = "What the server can read off single gradients; on the right the nearest image of the site."
    return Html(f'<figure><img alt="" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>')


def _row(finding: dict[str, Any]) -> list[object]:
    verdict = finding["verdict"]
    must = _MUST.get(finding["model"])
    if findings.is_beside(finding["attack"]):
        must = ("contains", "below")
    kind = "" if must is None else "tag completed" if verdict in must else "tag failed"
    return [
        finding["model"], finding["attack"], _interval(finding["auroc"]), _interval(finding["tpr_at_1"]),
        _interval(finding["tpr_at_01"]), round(finding["epsilon_bound"], 2), finding["members"], finding["non_members"],
        tag("span", verdict, kind) if kind else verdict,
    ]  # fmt: skip


def _interval(value: list[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
