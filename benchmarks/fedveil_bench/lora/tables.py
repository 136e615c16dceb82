"""Code shared by the presets in this folder: convert the seeds' numbers, by row and metric, to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedveil_bench.common import resampling
from fedveil_bench.common import verdicts as common
from fedveil_bench.runner import BenchOutcome

Answers = Sequence[Mapping[str, Mapping[str, float]]]


def build_outcome(answers: Answers, settings: Mapping[str, Any], said: Sequence[str] = ()) -> BenchOutcome:
    """Return a table with a row for each row in the seeds' answers, and the preset's claims, preceded by `said`."""
    figures = {
        name: {
            m: resampling.over_seeds([resampling.from_constant(answer[name][m]) for answer in answers]) for m in metrics
        }
        for name, metrics in answers[0].items()
    }
    rows = [
        {"name": n, "metrics": {m: resampling.compute_interval(f) for m, f in of.items()}} for n, of in figures.items()
    ]
    claims = common.list_verdicts(
        common.judge_claims(figures, common.claims_of(settings), "+.2f"), len(answers), common.SEEDS
    )
    return BenchOutcome(rows, [*said, *claims], [f"this run: {len(answers)} seeds"])
