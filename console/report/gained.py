"""The end of the demo: an attack on each run, texts before and after, and the picture of what was gained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil.attacks import findings, side_by_side, verdict
from fedveil.attacks.findings import Audit
from fedveil.attacks.membership.alignment import Alignment
from fedveil.attacks.samples import Source
from fedveil.attacks.side_by_side import Attacked, Common
from fedveil.config import parse
from fedveil.console import samples
from fedveil.console.report import run_page, trade, trade_picture
from fedveil.console.report.left import FIGURES, PICTURE, REPORT, SUMMARY
from fedveil.console.runs import summary
from fedveil.console.runs.folder import Run, load
from fedveil.foreign import shown
from fedveil.records.files import write_atomic

_ROWS, _BY_HEART = 80, 12  # members and non-members of an attack, and members of its overfitted control
# In a file of its own the picture takes the reader's light or dark, as it takes the page's inside of one.
_OWN = (
    "<style>svg{color:#1f2328;background:#fff;font-family:sans-serif}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}</style>"
)


@dataclass(frozen=True)
class Measured:
    """What `measure` found.

    Attributes:
        told: the controls, for the next run of the same sites; None before the first run with a tap.
        attacked: None where the run has no tap.
    """

    told: Common | None
    attacked: Attacked | None = None


def measure(folder: Path, data: Path, before: Common | None) -> Measured:
    """Attacks the run in `folder` if it has a tap, beside controls, and asks its model for texts.

    Writes audit.json and samples.json.

    Args:
        folder: of a finished run.
        data: the sites' rows.
        before: the controls of a run before it, None for the first.

    Raises:
        FedVeilError: as `side_by_side` and `samples.write`.
    """
    run = load(folder)
    config = parse(run.config["config"])
    samples.write(folder)
    if not config.run.tap:
        return Measured(before)
    source = Source(data, most=_ROWS)
    told = before or side_by_side.common(folder, config, run.sites, source, [Alignment()], _BY_HEART)
    found = side_by_side.audit_beside(told, folder, config)
    _save(folder, found.audit)
    return Measured(told, found)


def compare(attacked: Mapping[Path, Attacked]) -> None:
    """Writes the audit.json of each run folder anew: each attack over all sites, beside the FedAvg run's same rows."""
    base = next((folder for folder in attacked if load(folder).method == summary.BASELINE), None)
    digest = _save(base, attacked[base].beside(None)) if base else ""
    for folder, run in attacked.items():
        if folder != base:
            _save(folder, run.beside(attacked[base] if base else None, digest))


def _save(folder: Path, audit: Audit) -> str:
    """Writes audit.json; its SHA-256."""
    content = json.dumps(audit.to_json(), indent=1).encode()
    write_atomic(folder / findings.FILE, content)
    return hashlib.sha256(content).hexdigest()


def write(out: Path, runs: Sequence[Run]) -> None:
    """Writes SUMMARY and REPORT into the folder `out`; of several runs PICTURE and its figures as JSON."""
    summary.write(out / SUMMARY, "demo", runs)
    run_page.write(out / REPORT, runs)
    arms = [trade.arm(run) for run in runs]
    for name in (PICTURE, FIGURES):
        (out / name).unlink(missing_ok=True)  # of an earlier demo
    if picture := trade_picture.svg(arms):
        (out / PICTURE).write_text(alone(picture))
        figures = json.dumps([asdict(arm) for arm in arms], indent=1)
        (out / FIGURES).write_text(figures + "\n")


def alone(svg: str) -> str:
    """A picture of a page as a file of its own."""
    return svg.replace(">", f">{_OWN}", 1)


def said(runs: Sequence[Run]) -> list[str]:
    """The verdict in words, and where more was measured; without one what each run's own audit comes to."""
    arms = [trade.arm(run) for run in runs]
    audits = [(run.name, Audit.read(run.folder)) for run in runs]
    own = [f"{shown(name, 80)}: {verdict.verdict(audit.findings)}" for name, audit in audits if audit]
    return [line for line in (*(list(filter(None, trade.verdict(arms))) or own), trade.larger(arms)) if line]
