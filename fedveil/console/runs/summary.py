"""Compare runs: as summary.json, in the schema of all results, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedveil.attacks.statistics import confidence_intervals
from fedveil.console.runs.run_reader import RunView
from fedveil.records.provenance import environment_info, git_commit
from fedveil.sanitize import sanitize

BASELINE = "fedavg"
# The keys that determine on which examples the server's test loss is computed, and how. Runs that differ in any are not
# comparable by loss.
_SCORED_BY = (
    "task.name", "task.evaluation", "task.source-column", "task.source-template", "task.target-column",
    "task.image-column", "task.image-window", "task.choices-column", "task.hint-column", "task.class-names",
    "task.max-tokens", "task.chat-template", "evaluate.eval-examples", "evaluate.max-new-tokens", "evaluate.num-beams",
)  # fmt: skip


def write_summary(file: Path, preset: str, runs: Sequence[RunView]) -> None:
    """Write a summary of the runs in the schema of benchmarks/results."""
    content = {
        "preset": preset,
        "form": "full",
        "commit": git_commit(),
        "environment": environment_info(),
        "rows": [_row(run) for run in runs],
        "paper": {},
        "differences": ["one seed: low and high equal the value, so they do not form an interval"],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def _row(run: RunView) -> dict[str, Any]:
    return {
        "name": run.name,
        "metrics": confidence_intervals([run.final]),
        "upload_bytes": run.upload_bytes,
        "download_bytes": run.download_bytes,
        "rounds": run.rounds_done,
        "seconds": round(run.seconds, 1),
        "state": run.status.get("state", "unknown"),
    }


def may_claim_privacy(run: RunView) -> bool:
    """Return whether the run may claim differential privacy, so that its cost should be reported."""
    config = run.config.get("config", {})
    fields = str(run.config.get("method", {}).get("fields"))
    return bool(config.get("dp.noise-multiplier") or config.get("dp.epsilon") or "epsilon" in fields)


def protected_method(run: RunView) -> str:
    """Return the run's method and the protections added to it, such as "fedavg + noise"."""
    config = run.config.get("config", {})
    secure = " + secure aggregation" if config.get("secure.enabled") else ""
    return run.method + secure + (" + noise" if config.get("dp.noise-multiplier") else "")


def protection(run: RunView) -> str:
    """Return the protection of the run's uploads: "none", a sum, noise with its epsilon and delta, or both."""
    config = run.config.get("config", {})
    parts = []
    if config.get("secure.enabled"):
        parts.append(f"sum of at least {sanitize(config.get('secure.min-sites', '?'), 20)} sites")
    if config.get("dp.noise-multiplier"):
        epsilon, delta = config.get("dp.epsilon"), config.get("dp.delta")
        parts.append(
            f"epsilon {epsilon:g} at delta {delta:g}"
            if isinstance(epsilon, int | float) and epsilon and isinstance(delta, int | float)
            else f"noise {sanitize(config['dp.noise-multiplier'], 20)}, no limit on epsilon"
        )
    elif "epsilon" in str(config_fields := run.config.get("method", {}).get("fields")):
        epsilon = config_fields.get("epsilon") if isinstance(config_fields, dict) else None
        parts.append(f"noise from the method, epsilon {sanitize(epsilon, 20)}" if epsilon else "noise from the method")
    return " and ".join(parts) or ("none" if run.config else "not known")


def different_scoring(runs: Sequence[RunView]) -> str:
    """Return why the runs' scores cannot be compared, with the keys that differ; "" if none differ."""
    configs = {run.name: run.config["config"] for run in runs if run.config.get("config")}
    words = []
    for key in _SCORED_BY:
        values = {name: sanitize(config.get(key, "unset"), 120) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            words.append(f"{key} ({', '.join(f'{name}: {value}' for name, value in values.items())})")
    return f"Scored differently, so the scores cannot be compared: {'; '.join(words)}." if words else ""


def metric_names(runs: Sequence[RunView]) -> list[str]:
    """Return all metrics that any run has, the loss first."""
    names = {name for run in runs for name in run.final}
    return sorted(names, key=lambda name: (name != "loss", name))


# Metrics by the names that papers use; the loss is told apart from training loss.
_METRIC_LABELS = {
    "loss": "test loss", "bleu": "BLEU", "rouge_l": "ROUGE-L", "nist": "NIST", "meteor": "METEOR", "cider": "CIDEr",
    "exact_match": "exact match", "macro_f1": "macro F1", "f1": "F1", "auroc": "AUROC",
    "preference_accuracy": "preference accuracy", "reward_margin": "reward margin",
}  # fmt: skip


def run_label(metric: str) -> str:
    """Return a metric's label for people; a metric of another package keeps its name."""
    return _METRIC_LABELS.get(metric, metric)


def baseline_of(run: RunView, runs: Sequence[RunView]) -> RunView | None:
    """Return the first FedAvg run without protection and with as many rounds, or None."""
    for other in runs:
        is_plain = other.method == BASELINE and protection(other) == "none"
        if is_plain and other.upload_bytes and other.rounds_done == run.rounds_done:
            return other
    return None


def upload_ratio(run: RunView, runs: Sequence[RunView]) -> float | None:
    """Return a run's upload bytes relative to its `baseline_of`, or None without a baseline."""
    baseline = baseline_of(run, runs)
    return run.upload_bytes / baseline.upload_bytes if baseline else None


def is_unchanged(run: RunView) -> str:
    """Return a note if no round after the first changed the model; "" if one did, or if there was only one round."""
    digests = {attempt["weights"] for attempt in run.attempts if attempt.get("weights") and not attempt.get("void")}
    if len(digests) != 1 or run.rounds_done < 2:
        return ""
    return (
        "the model is the same after every round, so the uploads changed nothing; check train.learning-rate and the "
        "losses that the sites report"
    )


def summary_table(runs: Sequence[RunView]) -> Table:
    """Return the runs as a rich table, one column per run."""
    table = Table("", title="After the last round, on the server's test data", title_justify="left")
    for run in runs:
        table.add_column(run.name, justify="right")
    for name in metric_names(runs):
        table.add_row(run_label(name), *(f"{run.final[name]:.4f}" if name in run.final else "-" for run in runs))
    table.add_row("adapter", *(run.adapter_weights or "-" for run in runs))
    table.add_row("protection", *(protection(run) for run in runs))
    table.add_section()
    table.add_row("upload bytes", *(f"{run.upload_bytes:,}" for run in runs))
    table.add_row("download bytes", *(f"{run.download_bytes:,}" for run in runs))
    ratios = [upload_ratio(run, runs) for run in runs]
    table.add_row("upload / FedAvg", *("-" if ratio is None else f"{ratio:.4f}" for ratio in ratios))
    table.add_row("seconds in rounds", *(f"{run.seconds:.1f}" for run in runs))
    return table
