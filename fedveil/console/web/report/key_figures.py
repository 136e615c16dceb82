"""The report's strip of key figures: each run's loss, uploaded bytes, epsilon, and strongest attack."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.attacks.audit import verdict
from fedveil.attacks.audit.findings import AuditReport
from fedveil.console.runs import per_site, privacy_statements
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import protected_method
from fedveil.console.web.report.html import Html, equal_decimals, escape_text, html_tag, join_markup
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

Figure = tuple[str, object, str]  # its name, its value, and a note


def key_figures(runs: Sequence[RunView]) -> Html:
    """Return a box per run with its four figures; losses have equally many decimals."""
    losses = equal_decimals([run.final.get("loss") for run in runs])
    boxes = (_box(run, loss) for run, loss in zip(runs, losses, strict=True))
    return Html(f'<section class="keys" aria-label="Key figures">{join_markup(boxes)}</section>')


def _box(run: RunView, loss: object) -> Html:
    method = protected_method(run)
    about = join_markup([" ", html_tag("span", method, "note")]) if method != run.name else ""
    figures = [_loss(run, loss), _sent(run), _epsilon(run), _attack(run)]
    items = join_markup(
        Html(f"<div><dt>{escape_text(name)}</dt><dd>{escape_text(value)}{_small(note)}</dd></div>")
        for name, value, note in figures
    )
    return Html(f'<div class="key"><p>{html_tag("b", run.name)}{escape_text(about)}</p><dl>{items}</dl></div>')


def _small(note: str) -> Html:
    return html_tag("small", note, "note") if note else Html("")


def _loss(run: RunView, loss: object) -> Figure:
    if loss is not None:
        return "test loss", loss, ""
    at_sites = per_site.site_losses(run)
    return (
        ("loss at the sites", at_sites[-1][1], "on training examples") if at_sites else ("test loss", "not scored", "")
    )


def _sent(run: RunView) -> Figure:
    return "uploaded", f"{run.upload_bytes / 1e6:.2f} MB", ""


def _epsilon(run: RunView) -> Figure:
    figure = privacy_statements.privacy_figure(run)
    return "epsilon", figure.value, figure.note


def _attack(run: RunView) -> Figure:
    try:
        audit = AuditReport.read(run.folder)
    except StateError:
        return "strongest attack", "not known", "audit.json cannot be read"
    return attack_figure(audit)


def attack_figure(audit: AuditReport | None) -> Figure:
    """Return the strongest attack whose controls hold."""
    if audit is None:
        return "strongest attack", "not attacked", "what an attacker could learn is unknown"
    ordered = verdict.strongest_findings(audit.findings)
    if not ordered:
        return "strongest attack", "undecided", "no attack whose controls hold was tried"
    top = ordered[0]
    shows = "shows membership" if top.verdict == "above" else "not decided after correction for all attacks"
    about = f"{sanitize(top.attack, 60)} on {sanitize(top.model, 60)}: {shows} (0.5 is guessing)"
    return "strongest attack", f"AUROC {top.auroc[0]:.2f}", about
