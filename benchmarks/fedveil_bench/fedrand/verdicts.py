"""Sentences about the metrics in a FedRand table: orders, controls, and errors of reconstructed clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, ROUND_0
from fedveil_bench.common import resampling
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.verdicts import ClaimSentence, Must
from fedveil_bench.fedrand.adversary import Figures

_MUST: Mapping[str, Must] = {OVERFITTED: "won", ROUND_0: "lost", OTHER_ROWS: "lost"}


def list_verdicts(rows: Mapping[str, Figures], settings: Mapping[str, Any]) -> list[str]:
    """Return sentences about the paper's orders, the controls and the errors that the preset lists.

    `rows` has the metrics of each row of the result, over all seeds.
    """
    said: list[str] = []
    seeds = 0
    for order in settings.get("orders", []):
        metric, view = order["metric"], order["view"]
        figures = {
            name: f if order["better"] == "higher" else resampling.negate_metric(f)
            for name in settings["methods"]
            if (f := rows[f"{name} {view}".strip()].get(metric)) is not None
        }
        what = f"{metric} of {view or 'the method'} ({order['better']} first)"
        if len(figures) > 1:
            said.append(common.describe_ordering(figures, order["rows"], what))
            seeds = max(len(f.seeds) for f in figures.values())
    if said:
        said.append(common.describe_correction("all pairs of an order", seeds))
    said += _controls(rows, settings)
    of_claims = max((len(f.seeds) for of_row in rows.values() for f in of_row.values()), default=0)
    said += common.list_verdicts(common.judge_claims(rows, common.claims_of(settings)), of_claims)
    pairs = settings.get("errors", [])
    errors = [[rows[f"{name} client"]["reconstruction error"] for name in pair] for pair in pairs]
    less = [resampling.subtract_metrics(smaller, larger) for smaller, larger in errors]
    sides = ("is smaller than", "is larger than", "is not told from")
    for pair, d, word in zip(
        pairs, less, common.decide_words([common.judge_sign(d, *sides) for d in less]), strict=True
    ):
        shown = resampling.format_interval(resampling.compute_interval(d), "+.3g")
        said.append(f"Reconstruction error: {pair[0]} {word} {pair[1]} (difference {shown}).")
    return said


def _controls(rows: Mapping[str, Figures], settings: Mapping[str, Any]) -> list[str]:
    """Judge each control that the preset names, and the wrong-site control of every alignment attack."""
    margin = settings.get("control_margin", common.CONTROL_MARGIN)
    none, found = list[str](), list[tuple[str, ClaimSentence]]()
    asked = [
        (name, must, metric)
        for name, must in _MUST.items()
        for metric in rows.get(name, {})
        if metric in settings.get("controls", [])
    ]
    # A metric begins with the name of its part.
    asked += [(name, "not won", m) for name, of in rows.items() for m in of if m.endswith("alignment, wrong site")]
    for name, must, metric in asked:
        figure, text = rows[name][metric], f"Control {name}, {metric}"
        if must == "lost" and np.ptp(figure.replicates) == 0 and figure.value == common.CHANCE:
            none.append(f"{text}: all rows score the same, so it cannot fail: no control.")
            continue
        i = resampling.compute_interval(figure if must == "won" else resampling.of_rows(figure))
        text += f": {resampling.format_interval(i)}, expected {common.describe_control_range(must, margin)}"
        found.append((text, common.judge_control(figure, must, margin)))
    return [*none, *common.list_control_verdicts(found)]
