"""A run from each site's side: how often it took part, what it sent, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedveil.console.runs.folder import Run


@dataclass
class SiteRecord:
    """One site's part in a run. `failures` are (round, reason); losses are those of the last accepted upload."""

    name: str
    asked: int = 0
    accepted: int = 0
    examples: int | None = None
    loss_received: float | None = None
    loss_trained: float | None = None
    train_seconds: float | None = None
    up: int = 0
    down: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)


def of(run: Run) -> list[SiteRecord]:
    """Every site of the run."""
    found = {name: SiteRecord(name) for name in run.sites}
    for attempt in run.attempts:
        for name in attempt.get("cohort", []):
            found[name].asked += 1
        for name in [] if attempt.get("void") else attempt.get("accepted", []):
            found[name].accepted += 1
            _report(found[name], attempt.get("reports", {}).get(name, {}))
        for name, reason in attempt.get("failed", {}).items():
            found[name].failures.append((int(attempt["round"]), str(reason)))
    for message in run.messages:
        site = found[str(message["site"])]
        if message["direction"] == "up":
            site.up += int(message["bytes"])
        else:
            site.down += int(message["bytes"])
    return list(found.values())


def _report(site: SiteRecord, report: dict[str, float]) -> None:
    if "num_examples" in report:
        site.examples = int(report["num_examples"])
    site.loss_received = report.get("loss_received", site.loss_received)
    site.loss_trained = report.get("loss_trained", site.loss_trained)
    if "train_seconds" in report:
        site.train_seconds = (site.train_seconds or 0.0) + report["train_seconds"]
