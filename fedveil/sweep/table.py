"""The results table of a sweep, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from fedveil.sanitize import sanitize
from fedveil.sweep.sweep import SweepResult, half_width

__all__ = ["seeds_in_words", "sweep_table"]


def sweep_table(result: SweepResult) -> Table:
    """Return one row per cell, with each score's mean and 95 % interval over seeds."""
    cells = result.intervals()
    names = list(dict.fromkeys(name for _, scores in cells for name in scores))
    listed = Table("cell", title=f"{len(cells)} cells, {seeds_in_words(result.grid.seeds)}")
    for name in names:
        listed.add_column(sanitize(name, 40), justify="right", no_wrap=True)
    with_epsilon = any(run.epsilon is not None for run in result.runs)
    if with_epsilon:
        listed.add_column("epsilon", justify="right")
    for cell, scores in cells:
        row = [_words(scores[name]) if name in scores else "" for name in names]
        spent = [run.epsilon for run in result.runs if run.cell.number == cell.number and run.epsilon is not None]
        row += [f"{max(spent):.3g}" if spent else ""] if with_epsilon else []
        listed.add_row(sanitize(cell.label, 80), *row)
    return listed


def seeds_in_words(seeds: int) -> str:
    """Return the number of seeds, and the meaning of the figures."""
    return "1 seed, no interval" if seeds == 1 else f"{seeds} seeds: mean ± 95 % interval"


def _words(interval: Mapping[str, float]) -> str:
    """Return the mean with its 95 % interval; a single seed has no interval."""
    return f"{interval['mean']:.4g}" + (f" ± {half_width(interval):.2g}" if interval["n"] > 1 else "")
