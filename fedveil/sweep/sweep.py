"""Run a grid in one process: a run folder for each cell and seed, a table, and a plot with intervals over seeds.

    <out>/<digest>-c1-s0/   a run folder; the digest covers the config and the data files' names, sizes and times
    <out>/sweep.json        every finished run, with its values and scores
    <out>/sweep.svg         the plot

| a run from an earlier call | in this call |
|---|---|
| completed | not repeated |
| ended by Ctrl-C, an error or a kill, after a checkpoint | resumes from the checkpoint |
| ended before its first checkpoint | starts over |
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from fedveil import tasks
from fedveil.attacks.statistics import confidence_intervals
from fedveil.config import RunConfig, parse
from fedveil.console.run_config_args import flatten_config
from fedveil.console.runs.run_reader import status_of
from fedveil.errors import ConfigError, StateError
from fedveil.local import LocalFederation
from fedveil.local.config_rules import read_config, require_local
from fedveil.models import own_module
from fedveil.records import process_exit
from fedveil.records.atomic_files import write_atomic
from fedveil.runs import Run
from fedveil.server_app import checkpoints
from fedveil.sweep.grid import Cell, Grid

__all__ = ["SweepResult", "SweepRun", "half_width", "run_sweep"]

Say = Callable[[str], None]
FILE = "sweep.json"


@final
@dataclass(frozen=True)
class SweepRun:
    """One run of a cell.

    Attributes:
        cell: the cell with its values.
        seed: run.seed.
        folder: the run folder.
        scores: the final model's scores.
        epsilon: the largest bound over all sites; None without a privacy guarantee.
        upload_bytes: total over all sites and rounds.
    """

    cell: Cell
    seed: int
    folder: Path
    scores: Mapping[str, float]
    epsilon: float | None
    upload_bytes: int


@final
@dataclass(frozen=True)
class SweepResult:
    """The finished runs of a grid.

    Attributes:
        grid: the requested grid.
        runs: ordered by cell, then by seed.
        better: for each metric of the task, whether "lower" or "higher" is better.
    """

    grid: Grid
    runs: list[SweepRun]
    better: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run: cell, seed, the grid's keys, the scores, epsilon, upload bytes and folder."""
        return [
            {
                "cell": run.cell.number, "seed": run.seed, **run.cell.values, **run.scores,
                **({} if run.epsilon is None else {"epsilon": run.epsilon}),
                "upload_bytes": run.upload_bytes, "folder": str(run.folder),
            }
            for run in self.runs
        ]  # fmt: skip

    def intervals(self) -> list[tuple[Cell, dict[str, dict[str, float]]]]:
        """Return each cell with each score's "mean", "low" and "high" over its seeds, and the number of seeds, "n"."""
        by_cell: dict[int, list[SweepRun]] = {}
        for run in self.runs:
            by_cell.setdefault(run.cell.number, []).append(run)
        return [(runs[0].cell, confidence_intervals([run.scores for run in runs])) for runs in by_cell.values()]

    def best(self, metric: str) -> Cell:
        """Return the cell with the best mean of a metric. Raises ConfigError if no run has it."""
        found = [(scores[metric]["mean"], cell) for cell, scores in self.intervals() if metric in scores]
        found = [(mean, cell) for mean, cell in found if math.isfinite(mean)]
        if not found:
            known = ", ".join(sorted({name for run in self.runs for name in run.scores})) or "none"
            raise ConfigError(
                f"metric: expected one of the runs' metrics with finite values ({known}), found {metric!r}"
            )
        pick = max if self.better.get(metric) == "higher" else min
        return pick(found, key=lambda scored: scored[0])[1]


def half_width(interval: Mapping[str, float]) -> float:
    """Return half the width of an interval; 0 for a single seed, which has no interval."""
    return interval["high"] - interval["mean"]


def run_sweep(
    config: str | Path | Mapping[str, object] | RunConfig,
    sites: Mapping[str, str | Path] | int,
    grid: Grid,
    out: str | Path,
    device: str = "cpu",
    say: Say = lambda text: None,
    federate: Callable[..., LocalFederation] = LocalFederation.from_config,
) -> SweepResult:
    """Run every (cell, seed) pair not yet completed in `out`; write sweep.json after each.

    Every config is checked before the first run. Ctrl-C ends the current run; a second call resumes it.

    Args:
        config, sites, device: as for `LocalFederation.from_config`; the config needs task.evaluation.
        grid: the cells and seeds.
        out: the parent of the run folders.
        say: called with a line of text before each run.
        federate: creates each federation; for tests.

    Raises:
        ConfigError: a config is invalid, has no task.evaluation, or sets a key that the sweep sets.
    """
    folder = Path(out).expanduser()
    plain = read_config(config)
    if plain.run.name or plain.run.resume or plain.run.dir != RunConfig().run.dir:
        raise ConfigError("run.name: a sweep names its own runs; leave out run.name, run.dir and run.resume")
    if not plain.task.evaluation:
        raise ConfigError("task.evaluation: a sweep needs test data to compare cells; set this key")
    data = _data_of(plain, sites)
    planned = [
        (cell, seed, _cell_config(plain, cell, seed, folder, data))
        for cell in grid.cells()
        for seed in range(grid.seeds)
    ]
    for _, _, cell_config in planned:
        require_local(cell_config, sites if isinstance(sites, int) else len(sites), isinstance(sites, int))
    better = {name: of.better for name, of in tasks.task_info(plain.task.name).metrics(plain.task).items()}
    result = SweepResult(grid, [], better)
    for number, (cell, seed, cell_config) in enumerate(planned, 1):
        at = folder / cell_config.run.name
        if _state(at) == "completed":
            say(f"run {number} of {len(planned)}: {cell.label}, seed {seed}: already completed")
        else:
            say(f"run {number} of {len(planned)}: {cell.label}, seed {seed}")
            federate(_continued(cell_config, at), sites, device).run()
        result.runs.append(_ended(cell, seed, at))
        write_atomic(folder / FILE, _to_json(result).encode())
    return result


def _cell_config(config: RunConfig, cell: Cell, seed: int, out: Path, data: object) -> RunConfig:
    """Return one run's config. Its name has a digest of everything that determines the result. Raises ConfigError."""
    flat = config.flat() | flatten_config(cell.values) | {"run.seed": seed}
    parse(flat)
    digest = hashlib.sha256(json.dumps([flat, data], sort_keys=True, default=str).encode()).hexdigest()[:10]
    return parse(flat | {"run.dir": str(out), "run.name": f"{digest}-c{cell.number}-s{seed}"})


def _data_of(config: RunConfig, sites: Mapping[str, str | Path] | int) -> list[object]:
    """Return the sites', the server's and task.module's files, which determine the result, with sizes and times."""
    named = {} if isinstance(sites, int) else {name: Path(of).expanduser().absolute() for name, of in sites.items()}
    server = [Path(of).expanduser().absolute() for of in (config.task.evaluation, config.task.data) if of]
    own = [own_module.find_module(config.task.module)] if config.task.module else []
    return [
        sites if isinstance(sites, int) else {name: _files(of) for name, of in named.items()},
        *(_files(of) for of in (*server, *own)),
    ]


def _files(at: Path) -> list[tuple[str, int, int]]:
    files = sorted(file for file in at.rglob("*") if file.is_file()) if at.is_dir() else [at]
    return [(str(file), (about := file.stat()).st_size, about.st_mtime_ns) for file in files if file.exists()]


def _to_json(result: SweepResult) -> str:
    """Return the content of sweep.json, with non-finite numbers as text."""
    rows = [{key: _json_value(value) for key, value in row.items()} for row in result.rows]
    grid = {key: list(values) for key, values in result.grid.values.items()}
    return json.dumps({"grid": grid, "runs": rows}, indent=1)


def _json_value(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _state(folder: Path) -> str:
    try:
        return str(status_of(folder).get("state", ""))
    except StateError:  # there is no run yet
        return ""


def _continued(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config to start or resume the run in a folder; remove a run that has no checkpoint."""
    if not folder.exists():
        return config
    if checkpoints.has_checkpoint(folder):
        return parse(config.flat() | {"run.resume": True})
    if (folder / process_exit.LOCK).exists() and not process_exit.is_dead(folder):
        raise StateError(f"{folder}: another process is using this run; wait, or choose another folder")
    shutil.rmtree(folder)
    return config


def _ended(cell: Cell, seed: int, folder: Path) -> SweepRun:
    run = Run(folder)
    epsilon = run.epsilon
    sent = sum(int(row.get("upload_bytes", 0)) for row in run.metrics)
    return SweepRun(cell, seed, folder, run.scores, max(epsilon.values()) if epsilon else None, sent)
