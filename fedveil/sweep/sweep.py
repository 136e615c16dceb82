"""Run a grid in one process: a run folder for each cell and seed, a table, and a picture with intervals over seeds.

    <out>/<digest>-c1-s0/   a run folder; the digest is of the config and of the data files' names, sizes, times
    <out>/sweep.json        every run that has ended, with its values and scores
    <out>/sweep.svg         the picture

| a run of an earlier sweep | now |
|---|---|
| completed | not run again |
| ended after a checkpoint: Ctrl-C, an error, a killed process | goes on from there |
| ended before one | starts again |
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
        cell: its values.
        seed: run.seed.
        folder: its run folder.
        scores: of its final model.
        epsilon: largest bound over its sites; None without a privacy guarantee.
        upload_bytes: of all sites and rounds.
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
    """The runs of a grid that have ended.

    Attributes:
        grid: what was asked for.
        runs: by cell, then seed.
        better: for each metric of the task, "lower" or "higher".
    """

    grid: Grid
    runs: list[SweepRun]
    better: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run: cell, seed, the grid's keys, the scores, epsilon and bytes."""
        return [
            {
                "cell": run.cell.number, "seed": run.seed, **run.cell.values, **run.scores,
                **({} if run.epsilon is None else {"epsilon": run.epsilon}),
                "upload_bytes": run.upload_bytes, "folder": str(run.folder),
            }
            for run in self.runs
        ]  # fmt: skip

    def intervals(self) -> list[tuple[Cell, dict[str, dict[str, float]]]]:
        """Return each cell with each score's "mean", "low" and "high" over its seeds, and their number "n"."""
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
                f"metric: expected one that the runs have ({known}), with finite values, found {metric!r}"
            )
        pick = max if self.better.get(metric) == "higher" else min
        return pick(found, key=lambda scored: scored[0])[1]


def half_width(interval: Mapping[str, float]) -> float:
    """Return half of an interval's width; 0 for one seed, which has no interval."""
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
    """Run every cell with every seed that has not completed in `out`; write sweep.json after each.

    Every config is checked before the first run. Ctrl-C ends the current run, which a second call continues.

    Args:
        config, sites, device: as for `LocalFederation.from_config`; the config needs task.evaluation.
        grid: the cells and seeds.
        out: folder of the run folders.
        say: called with a line before each run.
        federate: makes each federation; for tests.

    Raises:
        ConfigError: a config is wrong, has no task.evaluation, or names what the sweep sets.
    """
    folder = Path(out).expanduser()
    plain = read_config(config)
    if plain.run.name or plain.run.resume or plain.run.dir != RunConfig().run.dir:
        raise ConfigError("run.name: expected none with a sweep, which names its runs itself; leave out run.name, "
                          "run.dir and run.resume")  # fmt: skip
    if not plain.task.evaluation:
        raise ConfigError("task.evaluation: expected test data, by which a sweep compares its cells, found none")
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
            say(f"run {number} of {len(planned)}: {cell.label}, seed {seed}: completed before")
        else:
            say(f"run {number} of {len(planned)}: {cell.label}, seed {seed}")
            federate(_continued(cell_config, at), sites, device).run()
        result.runs.append(_ended(cell, seed, at))
        write_atomic(folder / FILE, _to_json(result).encode())
    return result


def _cell_config(config: RunConfig, cell: Cell, seed: int, out: Path, data: object) -> RunConfig:
    """Return the config of one run. Its name has a digest of all that decides the result. Raises ConfigError."""
    flat = config.flat() | flatten_config(cell.values) | {"run.seed": seed}
    parse(flat)
    digest = hashlib.sha256(json.dumps([flat, data], sort_keys=True, default=str).encode()).hexdigest()[:10]
    return parse(flat | {"run.dir": str(out), "run.name": f"{digest}-c{cell.number}-s{seed}"})


def _data_of(config: RunConfig, sites: Mapping[str, str | Path] | int) -> list[object]:
    """Return the files that decide a result, with sizes and times: of the sites, the server and an own model."""
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
    """Return the content of sweep.json, where a number that is not finite is text."""
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
    """Return the config with which the run in a folder begins, or goes on; remove a run that had no checkpoint."""
    if not folder.exists():
        return config
    if checkpoints.has_checkpoint(folder):
        return parse(config.flat() | {"run.resume": True})
    if (folder / process_exit.LOCK).exists() and not process_exit.is_dead(folder):
        raise StateError(f"{folder}: expected no other process in this run, found one; wait, or name another folder")
    shutil.rmtree(folder)
    return config


def _ended(cell: Cell, seed: int, folder: Path) -> SweepRun:
    run = Run(folder)
    epsilon = run.epsilon
    sent = sum(int(row.get("upload_bytes", 0)) for row in run.metrics)
    return SweepRun(cell, seed, folder, run.scores, max(epsilon.values()) if epsilon else None, sent)
