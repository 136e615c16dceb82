"""Plot a sweep: one row per cell, one dot per seed, and the mean with its 95 % interval over seeds."""

from __future__ import annotations

from typing import Any

from fedveil.console.web.report.line_chart import COLOURS, INK, draw_curves
from fedveil.sanitize import sanitize
from fedveil.sweep.sweep import SweepResult, half_width
from fedveil.sweep.table import seeds_in_words

__all__ = ["sweep_svg"]

MAX_CELLS = 40


def sweep_svg(result: SweepResult, metric: str) -> str:
    """Return the plot of the first MAX_CELLS cells as an SVG element. Raises ConfigError if no run has the metric."""
    best = result.best(metric).number
    cells = [(cell, scores[metric]) for cell, scores in result.intervals() if metric in scores]
    left = f" (first {MAX_CELLS} of {len(cells)})" if len(cells) > MAX_CELLS else ""
    cells = cells[:MAX_CELLS]
    words = "; ".join(
        f"{cell.label}: {of['mean']:.4g}" + (f" ± {half_width(of):.2g}" if of["n"] > 1 else "") for cell, of in cells
    )

    def draw(axes: Any) -> None:
        for at, (cell, of) in enumerate(cells):
            colour = COLOURS[2] if cell.number == best else COLOURS[0]
            seeds = [run.scores[metric] for run in result.runs if run.cell.number == cell.number]
            axes.plot(seeds, [at] * len(seeds), "o", color=INK, alpha=0.35, markersize=3.5)
            axes.errorbar(of["mean"], at, xerr=half_width(of), fmt="D", color=colour, capsize=3, markersize=5)
        axes.set_yticks(range(len(cells)), [sanitize(cell.label, 60) for cell, _ in cells])
        axes.invert_yaxis()
        axes.set(xlabel=f"{metric} ({result.better.get(metric, 'lower')} is better){left}")
        axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)

    caption = f"{metric} of each cell: {seeds_in_words(result.grid.seeds)}. {words}"
    return draw_curves("sweep", (6.4, 0.9 + 0.34 * len(cells)), sanitize(caption, 4000), draw)
