"""Sweeps: run one config over a grid of values and seeds, in one process.

from fedveil.sweep import Grid, run_sweep

grid = Grid.from_texts(["train.learning-rate=1e-3,3e-3"], seeds=3)
result = run_sweep("run.toml", {"north": "rows/north", "south": "rows/south"}, grid, "sweep")
result.rows                                  # one per cell and seed, for pandas
result.best("loss").values                   # {"train.learning-rate": 0.003}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedveil.sweep.grid import Cell, Grid

if TYPE_CHECKING:
    from fedveil.sweep.sweep import SweepResult, run_sweep

__all__ = ["Cell", "Grid", "SweepResult", "run_sweep"]


def __getattr__(name: str) -> Any:
    """Import the names that need torch only on first use, because `fedveil --help` imports this package."""
    if name not in ("SweepResult", "run_sweep"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fedveil.sweep import sweep

    return getattr(sweep, name)
