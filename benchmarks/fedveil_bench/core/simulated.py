"""Measure the app on Flower's simulation engine, by number of nodes: seconds per round, and all processes' memory.

Memory is PSS: the engine's processes share pages, which a sum of RSS would count once per process. The benchmark runs
in pieces: numbers of nodes in the pieces file are not run again.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.common import resumable_rows
from fedveil_bench.common.growth_rates import fit_exponent
from fedveil_bench.process_monitor.usage import ProcessUsage
from fedveil_bench.runner import BenchOptions, BenchOutcome

PACKAGES = ("ray",)


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return one row for each number of nodes, and the exponents.

    Raises:
        ConfigError: there is no simulation engine, or a run did not complete.
    """
    if options.simulation is None:
        raise ConfigError("core/simulation: expected an engine, found none; run it as `fedveil bench core/simulation`")
    rows = []
    for nodes in settings["nodes"]:
        name = f"{nodes} nodes, {settings['rounds']} rounds"
        rows.append(resumable_rows.measure_row(options.pieces, name, partial(_row, nodes, settings, options)))
        told = ", ".join(f"{name} {m['mean']:.1f}" for name, m in rows[-1]["metrics"].items())
        options.say(f"{nodes} nodes: {told}")
    points = [(row["nodes"], s) for row in rows for s in row["points"]]
    metrics = {
        "a of seconds ~ N^a": fit_exponent([n for n, _ in points], [s for _, s in points]),
        "b of memory ~ N^b": fit_exponent(
            [row["nodes"] for row in rows], [row["metrics"]["all processes MB"]["mean"] for row in rows]
        ),
    }
    told = "; ".join(f"{name} is {m['mean']:.2f} [{m['low']:.2f}, {m['high']:.2f}]" for name, m in metrics.items())
    return BenchOutcome([*rows, {"name": "exponents", "metrics": metrics}], [f"Flower's simulation engine: {told}."])


def _row(nodes: int, settings: dict[str, Any], options: BenchOptions) -> dict[str, Any]:
    data = str(resources.data_folder("e2e"))
    with tempfile.TemporaryDirectory() as scratch, options.simulation() as simulation:
        config = settings["config"] | {"task.data": data, "task.evaluation": data, "run.rounds": settings["rounds"]}
        config |= {"run.dir": scratch, "run.name": "run", "cohort.sites": nodes, "cohort.min-sites": nodes}
        with ProcessUsage(simulation.processes.alive, lambda command: "all", every=0.5, shared=True) as usage:
            status = simulation.run(nodes, config, settings["seconds"])
        if status.get("state") != "completed":
            raise ConfigError(f"{nodes} nodes: expected a completed run, found {status or 'no status'}")
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "accepted" in line]
    seconds = [line["seconds"] for line in rounds]
    metrics = {"first round s": confidence_interval(seconds[:1]), "later rounds s": confidence_interval(seconds[1:])}
    metrics["all processes MB"] = confidence_interval([max(mb["all"] for _, mb in usage.timeline if "all" in mb)])
    return {"nodes": nodes, "points": seconds[1:], "metrics": metrics} | {
        "rounds": len(rounds),
        "upload_bytes": rounds[-1]["upload_bytes"],
    }
