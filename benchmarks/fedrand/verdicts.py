"""What the figures of a FedRand table say, in sentences: orders, controls, and errors of rebuilt clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, ROUND_0
from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common import verdicts as common
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand.adversary import Figures


def verdicts(rows: Mapping[str, Figures], settings: Mapping[str, Any]) -> list[str]:
    """Sentences on the orders of the paper, the controls and the errors that the preset asks about.

    `rows` are the figures of each row of the result, over all seeds.
    """
    said: list[str] = []
    seeds = 0
    for order in settings.get("orders", []):
        metric, view = order["metric"], order["view"]
        figures = {
            name: f if order["better"] == "higher" else resampling.negated(f)
            for name in settings["methods"]
            if (f := rows[f"{name} {view}".strip()].get(metric)) is not None
        }
        what = f"{metric} of {view or 'the method'} ({order['better']} first)"
        if len(figures) > 1:
            said.append(common.ordering(figures, order["rows"], what))
            seeds = max(len(f.seeds) for f in figures.values())
    if said:
        said.append(common.how("all pairs of an order", seeds))
    for control, side in ((OVERFITTED, "above"), (ROUND_0, "contains"), (OTHER_ROWS, "contains")):
        for metric, figure in rows.get(control, {}).items():
            if metric in settings.get("controls", []):
                said.append(_control(control, side, metric, figure))
    for name, figures in rows.items():
        for metric, figure in figures.items():  # a metric begins with the name of its part
            if metric.endswith("alignment, wrong site"):
                said.append(_control(name, "not above", metric, figure))
    of_claims = max((len(f.seeds) for of_row in rows.values() for f in of_row.values()), default=0)
    said += common.table(common.compared(rows, settings.get("claims", [])), of_claims)
    pairs = settings.get("errors", [])
    errors = [[rows[f"{name} client"]["reconstruction error"] for name in pair] for pair in pairs]
    less = [resampling.less(smaller, larger) for smaller, larger in errors]
    sides = ("is smaller than", "is larger than", "is not told from")
    for pair, d, word in zip(pairs, less, common.words([common.told(d, *sides) for d in less]), strict=True):
        shown = resampling.shown(resampling.interval(d), "+.3g")
        said.append(f"Reconstruction error: {pair[0]} {word} {pair[1]} (difference {shown}).")
    return said


def _control(name: str, side: str, metric: str, figure: Figure) -> str:
    """A control to win must do so over the seeds; one to lose fails as soon as these models' rows tell."""
    if side != "above" and np.ptp(figure.replicates) == 0 and figure.value == 0.5:
        return f"Control {name}, {metric}: all rows score the same, so it cannot fail: no control."
    i = resampling.interval(figure if side == "above" else resampling.of_rows(figure))
    inside = i["low"] <= 0.5 <= i["high"]
    held = {"above": i["low"] > 0.5, "contains": inside, "not above": i["low"] <= 0.5}[side]
    asked = {"above": "wholly above 0.5", "contains": "0.5 inside", "not above": "not wholly above 0.5"}[side]
    return f"Control {name}, {metric}: {resampling.shown(i)}, expected {asked}: {'held' if held else 'NOT HELD'}."
