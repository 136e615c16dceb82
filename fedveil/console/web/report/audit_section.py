"""The report section on attack findings, from the audit.json written by `fedveil audit`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedveil.attacks import base
from fedveil.attacks.audit import findings, verdict
from fedveil.attacks.audit.attack_words import describe_attack
from fedveil.attacks.audit.findings import AttackFinding, AuditReport
from fedveil.console.web.report import forest_plot
from fedveil.console.web.report.html import Html, html_details, html_list, html_table, html_tag, join_markup
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

NOTE = (
    "AUROC 0.5 is guessing, 1 is certainty; 95 % intervals are bootstrapped over the examples. Every attack has a "
    "control on which it must succeed (overfitted: a model that memorized examples) and controls on which it must "
    "fail: round 0, a model trained on other examples, and an upload from a site that never had the examples (wrong "
    "site). Verdicts are "
    "corrected for multiple testing, so an interval may exclude 0.5 even if its verdict does not."
)
_SAID = {"above": "above 0.5", "below": "below 0.5", "contains": "not distinguishable from 0.5"}
_HELD = "tag completed"
_MUST: dict[str, tuple[str, ...]] = {
    base.ROUND_0: ("contains",),
    base.OTHER_ROWS: ("contains",),
    base.OVERFITTED: ("above",),
}


def findings_html(run: Path, with_verdict: bool = True) -> Html | None:
    """Return the findings about the run in folder `run`, the verdict first; None if it was not audited."""
    audit = AuditReport.read(run)
    if audit is None:
        return None
    parts: list[object] = [html_tag("p", verdict.audit_verdict(audit.findings), "verdict")] * with_verdict
    if plot := forest_plot.forest_svg(audit.findings, run.name):
        caption = html_tag("figcaption", forest_plot.forest_caption(audit.findings))
        parts.append(html_tag("figure", join_markup([Html(plot), caption]), "forest"))
        named = dict.fromkeys(f.attack for f in forest_plot.forest_rows(audit.findings))
        parts.append(
            html_list(f"{sanitize(name, 80)}: it {said}." for name in named if (said := describe_attack(name)))
        )
    head = ["AUROC", "TPR at 1 % FPR", "epsilon at least", "members", "non-members", "corrected verdict"]
    every = html_table(["model", "attack", *head], [_row(f) for f in audit.findings])
    parts += [
        html_list([*(note.replace("`", "") for note in audit.notes), *_below(audit.findings)]),
        html_details(f"All {len(audit.findings)} findings, including controls", every),
    ]
    if audit.rebuilt:
        parts += [
            html_tag("p", "How much of each site's tensors the server could reconstruct from its uploads:", "note"),
            html_table(
                ["site", "tensors seen", "participations between them"],
                [[r.site, f"{100 * r.coverage:.0f} %", r.staleness] for r in audit.rebuilt],
            ),
        ]
    if (sheet := reconstruction_images(run)) is not None:
        parts.append(sheet)
    return join_markup(parts)


def findings_in_words(run: Path) -> str:
    """Summarize the attacks on the run in folder `run` in one sentence; "" if it was not attacked."""
    try:
        audit = AuditReport.read(run)
    except StateError as error:
        return sanitize(error, 300)
    return verdict.audit_verdict(audit.findings) if audit else ""


def _below(found: Sequence[AttackFinding]) -> list[str]:
    """Return a sentence on findings below chance; [] if there are none."""
    descriptions = [f"{f.attack} on {f.model} ({_interval(f.auroc)})" for f in found if f.kind == "about the run"
            and f.verdict == "below"]  # fmt: skip
    if not descriptions:
        return []
    return [
        f"Below 0.5, even after correction: {', '.join(descriptions)}. Training examples score lower there, so the "
        "attack in this form does not reveal membership. An inverted attack was not tried."
    ]


def reconstruction_images(run: Path) -> Html | None:
    """Return the sheet of images reconstructed from the run in folder `run`; None if there is none."""
    file = run / findings.PICTURES
    if not file.is_file():
        return None
    source = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    caption = "Left: images that the server could reconstruct from single gradients. Right: the site's nearest image."
    return Html(f'<figure><img alt="" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>')


def _row(f: AttackFinding) -> list[object]:
    must = _MUST.get(f.model)
    if findings.is_control_name(f.attack):
        must = ("contains", "below")
    kind = "" if must is None else _HELD if f.verdict in must else "tag failed"
    return [
        f.model, f.attack, *map(_interval, (f.auroc, f.tpr_at_1)), f"{f.epsilon_bound:.2f}", f.members, f.non_members,
        html_tag("span", f"{_SAID[f.verdict]}{', as it must be' if kind == _HELD else ', but must not be'}", kind)
        if kind else _SAID[f.verdict],
    ]  # fmt: skip


def _interval(value: Sequence[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
