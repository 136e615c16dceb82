"""Check one result file: compare its figures with the seeds' values, and its sentences with its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.check import bootstrap, pieces, reference, sentences
from benchmarks.check.figure import Figure
from benchmarks.check.report import FileCheck

SHARES = ("read",)  # metrics with the exact interval for a share


def check_result(name: str, result: Mapping[str, Any], folder: Path) -> FileCheck:
    """Return the comparisons for one file; `folder` contains the pieces next to it."""
    check = FileCheck(name)
    rows = read_rows(result)
    without = 0
    for row, figures in rows.items():
        for metric, figure in figures.items():
            if len(figure.seeds) < 2:
                without += 1
                check.bound(f"{row}, {metric}: {figure} is not in order", figure.low <= figure.mean <= figure.high)
            else:
                _check_figure(check, f"{row}, {metric}", metric, figure)
    _check_losses(check, result, rows)
    _check_what_intervals_cover(check, result, rows)
    if without:
        reason = "the file has no value of each seed or repeat"
        check.unchecked.append(f"{without} figures and their intervals: {reason}")
    sentences.check_sentences(check, result, rows)
    if (beside := folder / f"{name}.pieces.jsonl").is_file():
        pieces.check_pieces(check, result, [json.loads(line) for line in beside.read_text().splitlines()])
    return check


def read_rows(result: Mapping[str, Any]) -> dict[str, dict[str, Figure]]:
    """Return the figures of all rows and of their curves, with what each interval covers."""
    covers_seeds = describe_cover(result).startswith("seeds")
    some_have_losses = any("source_losses" in row for row in result["rows"])
    found: dict[str, dict[str, Figure]] = {}
    for row in result["rows"]:
        losses = row.get("source_losses", {})
        drawn = {metric: bootstrap.draw_replicates(*bootstrap.read_losses(each)) for metric, each in losses.items()}
        # If other figures have losses by source, a figure without them covers only seeds.
        found[row["name"]] = {
            metric: Figure.from_json(
                each, metric not in drawn and (covers_seeds or some_have_losses), drawn.get(metric)
            )
            for metric, each in row["metrics"].items()
        }
        for point in row.get("curve", []) if covers_seeds or some_have_losses else []:
            if "metrics" in point:
                found[f"{row['name']}, round {point['round']}"] = {
                    metric: Figure.from_json(each, True) for metric, each in point["metrics"].items()
                }
    return found


def describe_cover(result: Mapping[str, Any]) -> str:
    """Return what the intervals cover, according to the file's own sentence; empty without such a sentence."""
    matches = (re.search(r"Intervals are of 95 % each, over (.+?); ", sentence) for sentence in result["verdicts"])
    return next((match[1] for match in matches if match), "")


def _check_figure(check: FileCheck, text: str, metric: str, figure: Figure) -> None:
    mean, half = reference.compute_mean(figure.seeds), figure.seeds_half
    check.compare(f"{text}: the mean is {mean}, the file has {figure.mean}", abs(mean - figure.mean) <= figure.slack)
    said = f"{text}: the interval is {mean - half} to {mean + half}, the file has {figure.low} to {figure.high}"
    if figure.of_seeds:
        check.compare(said, figure.has_seeds_interval())
    elif metric in SHARES:
        check.compare(f"{said} (a share)", figure.has_share_interval())
    else:
        check.bound(f"{said}, which is narrower", figure.covers_seeds())


def _check_losses(check: FileCheck, result: Mapping[str, Any], rows: Mapping[str, Mapping[str, Figure]]) -> None:
    """Compare each seed's figure with its losses by source, and the interval with a bootstrap over these losses."""
    for row in result["rows"]:
        for metric, found in row.get("source_losses", {}).items():
            figure, text = rows[row["name"]][metric], f"{row['name']}, {metric}"
            means = bootstrap.compute_means(*bootstrap.read_losses(found))
            is_equal = all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(means, figure.seeds, strict=True))
            check.compare(f"{text}: the losses by source give {means}, the file has {figure.seeds}", is_equal)
            assert figure.replicates is not None
            for end, rows_half, stored in zip(
                ("low", "high"), bootstrap.compute_halves(figure.replicates), figure.rows_halves(), strict=True
            ):
                is_near = abs(rows_half - stored) <= bootstrap.NEAR * max(rows_half, figure.slack)
                check.compare(f"{text}: the rows' part of {end} is {rows_half}, the file has {stored}", is_near)


def _check_what_intervals_cover(
    check: FileCheck, result: Mapping[str, Any], rows: Mapping[str, Mapping[str, Figure]]
) -> None:
    """Find a file that says "over rows and seeds" although none of its intervals is wider than the one over seeds."""
    if describe_cover(result).startswith("rows and seeds"):
        figures = [f for of_row in rows.values() for f in of_row.values() if len(f.seeds) > 1]
        wider = any(not figure.has_seeds_interval() for figure in figures)
        check.compare("the intervals are said to be over rows and seeds, and none is wider than that over seeds", wider)
