"""Check one result file: its figures against the seeds' values, and its sentences against its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.check import pieces, reference, sentences
from benchmarks.check.figure import Figure
from benchmarks.check.report import FileCheck

# Results of which every interval is over seeds: their runners keep one number for each seed and row.
SEEDS_ONLY = (
    "fedrand_e2e", "fedrand_quality", "fedrand_quantised", "lora_canaries", "lora_dart", "lora_participation",
    "lora_property", "lora_quality", "lora_viggo", "peers_e2e", "peers_simulated",
)  # fmt: skip
SHARES = ("read",)  # metrics whose interval is the exact one of a share


def check_result(name: str, result: Mapping[str, Any], folder: Path) -> FileCheck:
    """Return the comparisons of one file; `folder` has the pieces that lie beside it."""
    check = FileCheck(name)
    rows = {row["name"]: read_figures(row["metrics"]) for row in result["rows"]}
    without = 0
    for row, figures in rows.items():
        for metric, figure in figures.items():
            if len(figure.seeds) < 2:
                without += 1
                check.bound(f"{row}, {metric}: {figure} is not in order", figure.low <= figure.mean <= figure.high)
            else:
                _check_figure(check, f"{row}, {metric}", metric, figure, name in SEEDS_ONLY)
    for row in result["rows"]:
        for point in row.get("curve", []) if name in SEEDS_ONLY else []:
            for metric, figure in read_figures(point["metrics"]).items():
                _check_figure(check, f"{row['name']}, round {point['round']}, {metric}", metric, figure, True)
    if without:
        reason = "the file has no value of each seed or repeat"
        check.unchecked.append(f"{without} figures and their intervals: {reason}")
    sentences.check_sentences(check, result, rows, name in SEEDS_ONLY)
    if (beside := folder / f"{name}.pieces.jsonl").is_file():
        pieces.check_pieces(check, result, [json.loads(line) for line in beside.read_text().splitlines()])
    return check


def read_figures(metrics: Mapping[str, Any]) -> dict[str, Figure]:
    """Return a row's figures by metric."""
    return {metric: Figure.from_json(found) for metric, found in metrics.items()}


def _check_figure(check: FileCheck, text: str, metric: str, figure: Figure, seeds_only: bool) -> None:
    mean, half = reference.compute_mean(figure.seeds), figure.seeds_half
    check.compare(f"{text}: the mean is {mean}, the file has {figure.mean}", abs(mean - figure.mean) <= figure.slack)
    said = f"{text}: the interval is {mean - half} to {mean + half}, the file has {figure.low} to {figure.high}"
    if seeds_only:
        check.compare(said, figure.has_seeds_interval())
    elif metric in SHARES:
        check.compare(f"{said} (a share)", figure.has_share_interval())
    else:
        check.bound(f"{said}, which is narrower", figure.covers_seeds())
