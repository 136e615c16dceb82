"""Runs of one config over a grid of values and seeds, in one process.

from fedveil.sweep import Grid, run_sweep

grid = Grid.from_texts(["train.learning-rate=1e-3,3e-3"], seeds=3)
result = run_sweep("run.toml", {"north": "rows/north", "south": "rows/south"}, grid, "sweep")
result.rows                                  # one per cell and seed, for pandas
result.best("loss").values                   # {"train.learning-rate": 0.003}
"""

from __future__ import annotations

from fedveil.sweep.grid import Cell, Grid
from fedveil.sweep.sweep import SweepResult, run_sweep

__all__ = ["Cell", "Grid", "SweepResult", "run_sweep"]
