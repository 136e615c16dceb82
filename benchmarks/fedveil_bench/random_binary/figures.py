"""Figures for the accuracy table: curves by epoch, and how often entries moved."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any


def draw_figure(rows: Sequence[Mapping[str, Any]], laws: Mapping[str, Sequence[float]]) -> bytes:
    """Draw a PNG: an accuracy panel by epoch for each base, and a counts panel for the base with the most `laws`.

    Args:
        rows: rows with base, method, curve (an interval for each epoch) and counts.
        laws: for each method, the expected shares of entries that move 0, 1, ... times.
    """
    from matplotlib.figure import Figure as Canvas

    bases = list(dict.fromkeys(row["base"] for row in rows))
    canvas = Canvas(figsize=(5.5 * (len(bases) + 1), 4.2), layout="constrained")
    for at, base in enumerate(bases, 1):
        panel = canvas.add_subplot(1, len(bases) + 1, at, title=base, xlabel="epoch", ylabel="accuracy, %")
        for row in (row for row in rows if row["base"] == base):
            panel.plot([point["mean"] for point in row["curve"]], label=row["method"], marker=".")
            low = [max(0.0, point["low"]) for point in row["curve"]]  # with few seeds, t may give impossible values
            high = [min(100.0, point["high"]) for point in row["curve"]]
            panel.fill_between(range(len(row["curve"])), low, high, alpha=0.12)
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    of_base = {base: [row for row in rows if row["base"] == base and row["method"] in laws] for base in bases}
    counted = max(bases, key=lambda base: len(of_base[base]))
    shown = of_base[counted]
    panel = canvas.add_subplot(
        1, len(bases) + 1, len(bases) + 1, title=f"{counted}: how often entries moved, and Eq. 13 (rings)",
        xlabel="epochs in which an entry moved", ylabel="share of entries", yscale="log", ylim=(1e-6, 2),
    )  # fmt: skip
    for i, row in enumerate(shown):
        places = range(len(row["counts"]))
        beside = [k + 0.06 * (i - len(shown) / 2) for k in places]
        # Rings, because a law that is zero between two counts cannot be drawn as a line.
        panel.scatter(
            beside, [share or math.nan for share in laws[row["method"]]], facecolors="none", edgecolors=f"C{i}", s=60
        )
        panel.scatter(beside, [share or math.nan for share in row["counts"]], label=row["method"], color=f"C{i}", s=14)
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    held = io.BytesIO()
    canvas.savefig(held, format="png", dpi=110)
    return held.getvalue()
