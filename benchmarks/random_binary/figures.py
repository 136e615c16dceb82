"""Figures of the table of accuracy: curves by epoch, and how often entries moved."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any


def drawn(rows: Sequence[Mapping[str, Any]], laws: Mapping[str, Sequence[float]]) -> bytes:
    """A PNG: a panel of accuracy by epoch for each base, and one of counts.

    Args:
        rows: each with base, method, curve (an interval for each epoch) and counts.
        laws: by method, what share of the entries is to move 0, 1, ... times.
    """
    from matplotlib.figure import Figure as Canvas

    bases = list(dict.fromkeys(row["base"] for row in rows))
    canvas = Canvas(figsize=(5.5 * (len(bases) + 1), 4.2), layout="constrained")
    for at, base in enumerate(bases, 1):
        panel = canvas.add_subplot(1, len(bases) + 1, at, title=base, xlabel="epoch", ylabel="accuracy, %")
        for row in (row for row in rows if row["base"] == base):
            panel.plot([point["mean"] for point in row["curve"]], label=row["method"], marker=".")
            low, high = ([point[side] for point in row["curve"]] for side in ("low", "high"))
            panel.fill_between(range(len(row["curve"])), low, high, alpha=0.12)
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    shown = [row for row in rows if row["base"] == bases[0] and row["method"] in laws]
    panel = canvas.add_subplot(
        1, len(bases) + 1, len(bases) + 1, title=f"{bases[0]}: how often entries moved, and Eq. 13 (lines)",
        xlabel="epochs in which an entry moved", ylabel="share of entries", yscale="log", ylim=(1e-6, 2),
    )  # fmt: skip
    for i, row in enumerate(shown):
        places = range(len(row["counts"]))
        (line,) = panel.plot(places, [share or math.nan for share in laws[row["method"]]], lw=0.8)
        panel.scatter(
            [k + 0.06 * (i - len(shown) / 2) for k in places],
            [share or math.nan for share in row["counts"]],
            label=row["method"], color=line.get_color(), s=14,
        )  # fmt: skip
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    held = io.BytesIO()
    canvas.savefig(held, format="png", dpi=110)
    return held.getvalue()
