"""What the figures of a FedRand table say, in sentences: orders, controls, and errors of rebuilt clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand.adversary import Figures


def verdicts(rows: Mapping[str, Figures], settings: Mapping[str, Any]) -> list[str]:
    """Sentences on the orders of the paper, the controls and the errors that the preset asks about.

    `rows` are the figures of each row of the result, over all seeds.
    """
    said = []
    for order in settings.get("orders", []):
        sign = 1.0 if order["better"] == "higher" else -1.0
        metric, view = order["metric"], order["view"]
        figures = {
            name: Figure(sign * f.value, sign * f.replicates, f.count)
            for name in settings["methods"]
            if (f := rows[f"{name} {view}".strip()].get(metric)) is not None
        }
        what = f"{metric} of {view or 'the method'} ({order['better']} first)"
        if len(figures) > 1:
            said.append(resampling.ordering(figures, order["rows"], what))
    for control, side in (("overfitted FedAvg", "above"), ("round 0", "contains")):
        for metric, figure in rows.get(control, {}).items():
            if metric in settings.get("controls", []):
                said.append(_control(control, side, metric, figure))
    for name, figures in rows.items():
        if wrong := figures.get("alignment, wrong site"):
            said.append(_control(name, "not above", "alignment, wrong site", wrong))
    for smaller, larger in settings.get("errors", []):
        d = resampling.difference(
            rows[f"{larger} client"]["reconstruction error"], rows[f"{smaller} client"]["reconstruction error"]
        )
        verdict = "is smaller than" if d["low"] > 0 else "is not smaller than"
        said.append(f"Reconstruction error: {smaller} {verdict} {larger} (difference {d['mean']:.3g}).")
    return said


def _control(name: str, side: str, metric: str, figure: Figure) -> str:
    i = resampling.interval(figure)
    inside = i["low"] <= 0.5 <= i["high"]
    held = {"above": i["low"] > 0.5, "contains": inside, "not above": i["low"] <= 0.5}[side]
    asked = {"above": "wholly above 0.5", "contains": "0.5 inside", "not above": "not wholly above 0.5"}[side]
    return f"Control {name}, {metric}: {resampling.shown(i)}, expected {asked}: {'held' if held else 'NOT HELD'}."
