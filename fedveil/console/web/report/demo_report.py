"""Finish the demo: attack each run, generate texts before and after training, and draw the tradeoff chart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil.attacks.audit import compare_runs, findings, verdict
from fedveil.attacks.audit.compare_runs import RunAudit, SharedAuditInputs
from fedveil.attacks.audit.findings import AuditReport
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.samples import AuditDataSource
from fedveil.config import parse
from fedveil.console.demo_settings import ATTACKED
from fedveil.console.runs import sample_texts, summary
from fedveil.console.runs.run_reader import RunView, load_run
from fedveil.console.web.report import run_page, tradeoff, tradeoff_plot
from fedveil.console.web.report.demo_files import FIGURES, PICTURE, REPORT, SUMMARY
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

_BY_HEART = 12  # members in the overfitted control
# A standalone picture follows the reader's light or dark theme; inside a page, it follows the page's theme.
_OWN = (
    "<style>svg{color:#1f2328;background:#fff;font-family:sans-serif}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}</style>"
)


@dataclass(frozen=True)
class DemoMeasurements:
    """The results of `measure_runs`.

    Attributes:
        told: controls for the next run with the same sites; None before the first run with captured messages.
        attacked: the run's audit; None if the run has no captured messages.
    """

    told: SharedAuditInputs | None
    attacked: RunAudit | None = None


def measure_runs(folder: Path, data: Path, before: SharedAuditInputs | None) -> DemoMeasurements:
    """Attack the run in `folder` with controls if it has captured messages, and generate sample texts.

    Writes audit.json and samples.json.

    Args:
        folder: folder of a finished run.
        data: the sites' examples.
        before: controls from an earlier run; None for the first.

    Raises:
        FedVeilError: for the same reasons as `write_comparisons` and `write_samples`.
    """
    run = load_run(folder)
    config = parse(run.config["config"])
    sample_texts.write_samples(folder)
    if not config.run.capture_messages:
        return DemoMeasurements(before)
    shared_inputs = before or compare_runs.prepare_shared_inputs(
        folder, config, run.sites, AuditDataSource(data), [AlignmentAttack()], _BY_HEART, ATTACKED
    )
    audit_result = compare_runs.audit_run_pair(shared_inputs, folder, config)
    _save(folder, audit_result.audit)
    return DemoMeasurements(shared_inputs, audit_result)


def write_comparisons(attacked: Mapping[Path, RunAudit]) -> None:
    """Rewrite audit.json in each run folder, with each attack at each site and over all sites.

    FedAvg runs are compared with each other, each with those before it: the plain run first, then secure sums, then
    noise. All are attacked on the same examples.
    """
    bases = dict[str, RunAudit]()
    runs = {folder: tradeoff.read_tradeoff_run(load_run(folder)) for folder in attacked}
    for folder in sorted(attacked, key=lambda folder: (not runs[folder].is_plain, bool(runs[folder].noise))):
        is_compared = runs[folder].method == summary.BASELINE
        digest = _save(folder, attacked[folder].beside(bases if is_compared else {}))
        if is_compared:
            bases[digest] = attacked[folder]


def _save(folder: Path, audit: AuditReport) -> str:
    """Write audit.json and return its SHA-256."""
    content = json.dumps(audit.to_json(), indent=1).encode()
    write_atomic(folder / findings.FILE, content)
    return hashlib.sha256(content).hexdigest()


def write_demo_report(out: Path, runs: Sequence[RunView]) -> None:
    """Write SUMMARY and REPORT to the folder `out`, and for several runs also PICTURE and its values as JSON."""
    summary.write_summary(out / SUMMARY, "demo", runs)
    run_page.write_run_page(out / REPORT, runs)
    arms = [tradeoff.read_tradeoff_run(run) for run in runs]
    for name in (PICTURE, FIGURES):
        (out / name).unlink(missing_ok=True)  # from an earlier demo
    if picture := tradeoff_plot.tradeoff_svg(arms):
        (out / PICTURE).write_text(report_single_run(picture))
        figures = json.dumps([asdict(arm) for arm in arms], indent=1)
        (out / FIGURES).write_text(figures + "\n")


def report_single_run(svg: str) -> str:
    """Return a page's picture as the text of a standalone file."""
    return svg.replace(">", f">{_OWN}", 1)


def summary_sentences(runs: Sequence[RunView]) -> list[str]:
    """Return the verdict of the comparison or, without one, each run's own audit result."""
    if sentences := tradeoff.tradeoff_verdict([tradeoff.read_tradeoff_run(run) for run in runs]):
        return sentences[:1]
    audits = [(run.name, AuditReport.read(run.folder)) for run in runs]
    return [f"{sanitize(name, 80)}: {verdict.audit_verdict(audit.findings)}" for name, audit in audits if audit]
