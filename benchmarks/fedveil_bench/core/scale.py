"""Measure seconds and memory by number of sites: in process, with the ServerApp's strategy, and in a simulation.

Each case of the first two kinds runs in a separate process (many_sites.py), so that peak memory is measured per case.
The simulation (arrivals.py) uses the server costs that the second kind has just measured, and the costs of a SuperLink
that carries stock Flower messages of the same size on this machine. The exponent a in seconds ~ N^a is the slope of the
logarithms over all sizes; a constant part, which matters at small N, lowers the exponent.

The benchmark runs in pieces: cases in the pieces file are not run again. Each row names its commit.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench import folders
from fedveil_bench.common import resumable_rows
from fedveil_bench.common.growth_rates import fit_exponent
from fedveil_bench.core.arrivals import ArrivalCosts, simulate_round
from fedveil_bench.process_monitor.usage import classify_program, read_command_line
from fedveil_bench.runner import BenchOptions, BenchOutcome

_FIRST_STEADY = 1  # in round 0, all sites are new
_LEAST_MB = 1.0  # smaller growth counts as none, because the kernel counts pages, and Python rounds up
_ARRIVALS = "arrivals"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each mode, method and N, and a row with the exponents for each mode and method.

    Raises:
        ConfigError: there is no launcher, or a case failed.
    """
    if options.launch is None:
        raise ConfigError("core/scale: expected a launcher, found none; run it as `fedveil bench core/scale`")
    rows = []
    for way in ("in-process", "strategy"):
        for case in settings[way]["cases"]:
            for sites in settings[way]["sites"]:
                name = _name(way, case, sites, settings)
                rows.append(resumable_rows.measure_row(options.pieces, name, partial(_row, way, case, sites, settings)))
                options.say(_said(rows[-1]))
    relay = _superlink_seconds(settings, options)
    options.say(f"a SuperLink's CPU for a message of {settings['megabytes']} MB each way: {relay:.3f} s")
    rows += _arrivals(rows, relay, settings)
    fits = [_fit(group, of) for group, of in _groups(rows).items()]
    figure = _figure(_groups(rows))
    return BenchOutcome(rows + fits, [_verdict(fit) for fit in fits], files={"png": figure})


def _name(way: str, case: Mapping[str, Any], sites: int, settings: Mapping[str, Any]) -> str:
    size = f" of {settings['megabytes']} MB" if way == "strategy" else ""
    return f"{way}, {case['name']}, N={sites}, {settings['rounds']} rounds{size}"


def _row(way: str, case: Mapping[str, Any], sites: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    megabytes, rounds = settings["megabytes"] if way == "strategy" else 0, settings["rounds"]
    command = [sys.executable, "-m", "fedveil_bench.core.many_sites", way, case["method"], case.get("fields", "")]
    # Large blocks are returned to the system when they are freed, as in the ServerApp's own process.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(
        [*command, str(sites), str(rounds), str(megabytes)], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        raise ConfigError(f"{way}, {case['name']}, {sites} sites: expected figures, found {done.stderr[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    wall, cpu, sending = (found[f"{part}seconds"][_FIRST_STEADY:] for part in ("", "cpu_", "sending_cpu_"))
    metrics = {"seconds a round": confidence_interval(wall), "CPU seconds a round": confidence_interval(cpu)}
    metrics["grown MB"] = confidence_interval([found["grown_mb"]])
    if sending:
        metrics["CPU ms a message sent"] = confidence_interval([1000 * s / sites for s in sending])
        folding = [1000 * (s - down) / sites for s, down in zip(cpu, sending, strict=True)]
        metrics["CPU ms a message folded"] = confidence_interval(folding)
    about = {"group": f"{way}, {case['name']}", "sites": sites}
    points = {"seconds": wall, "CPU seconds": cpu}
    return about | {"metrics": metrics, "upload_bytes": found["upload_bytes"], "points": points}


def _superlink_seconds(settings: Mapping[str, Any], options: BenchOptions) -> float:
    """Return a SuperLink's CPU seconds for one message of this size, each way: runs with it minus runs without it."""
    asked = settings["relay"]
    launch, sites, rounds = options.launch, asked["sites"], asked["rounds"]
    assert launch is not None
    named = [launch.LocalSite(f"site-{i}") for i in range(sites)]
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, launch.LocalDeployment(named) as federation:
        for size in (settings["megabytes"] * 1_000_000, 1000):
            config = {"bytes": size, "rounds": rounds, "sites": sites, "out": str(Path(scratch) / f"{size}.json")}
            before = _superlink_cpu(federation)
            number = federation.run(folders.find_folder("core/stock_flower"), config)
            ended = federation.wait(number, 600)
            if not ended.completed:
                raise ConfigError(f"stock flower: expected a completed run, found: {ended.reason}")
            seconds.append(_superlink_cpu(federation) - before)
    messages = 2 * int(sites) * int(rounds)
    return max(seconds[0] - seconds[1], 0.0) / messages


def _superlink_cpu(federation: Any) -> float:
    found = [
        process
        for process in federation.processes.alive("superlink")
        if classify_program(read_command_line(process)) == "SuperLink"
    ]
    times = [process.cpu_times() for process in found]
    return sum((float(spent.user + spent.system) for spent in times), 0.0)


def _arrivals(rows: Sequence[Mapping[str, Any]], relay: float, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked = settings[_ARRIVALS]
    measured = [row for row in rows if row["group"] == f"strategy, {asked['case']}"][-1]["metrics"]
    send, fold = (measured[f"CPU ms a message {did}"]["mean"] / 1000 for did in ("sent", "folded"))
    fastest, slowest = asked["train_seconds"]
    costs = ArrivalCosts(
        send, fold, relay, asked["look_seconds"], asked["poll_seconds"], (fastest, slowest), settings["megabytes"],
        asked["megabytes_a_second"],
    )  # fmt: skip
    found = []
    for sites in asked["sites"]:
        drawn = [simulate_round(sites, costs, seed) for seed in range(asked["seeds"])]
        beyond = [one.seconds - one.training for one in drawn]
        metrics = {
            "seconds a round": confidence_interval([one.seconds for one in drawn]),
            "seconds beyond the training": confidence_interval(beyond),
            "last arrival s": confidence_interval([one.last_arrival for one in drawn]),
            "most uploads waiting": confidence_interval([float(one.most_waiting) for one in drawn]),
            "most SuperNodes waiting": confidence_interval([float(one.most_polling) for one in drawn]),
        }
        for name in drawn[0].busy:
            metrics[f"{name} busy"] = confidence_interval([one.busy[name] for one in drawn])
        row = {"name": f"{_ARRIVALS}, N={sites}", "sites": sites, "group": _ARRIVALS, "metrics": metrics}
        found.append(
            row
            | {
                "points": {"seconds beyond the training": beyond},
                "costs": {k: v for k, v in vars(costs).items() if k != "train_seconds"},
            }
        )
    return found


def _groups(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row["group"] == name] for name in dict.fromkeys(row["group"] for row in rows)}


def _fit(group: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metrics = {}
    for what in rows[0]["points"]:
        points = [(row["sites"], max(seconds, 1e-9)) for row in rows for seconds in row["points"][what]]
        metrics[f"a of {what} ~ N^a"] = fit_exponent([n for n, _ in points], [seconds for _, seconds in points])
    if "grown MB" in rows[0]["metrics"]:
        grown = [max(row["metrics"]["grown MB"]["mean"], _LEAST_MB) for row in rows]
        metrics["b of memory ~ N^b"] = fit_exponent([row["sites"] for row in rows], grown)
    return {"name": f"{group}: exponents", "metrics": metrics}


def _verdict(fit: Mapping[str, Any]) -> str:
    told = [f"{name} is {f['mean']:.2f} [{f['low']:.2f}, {f['high']:.2f}]" for name, f in fit["metrics"].items()]
    above = [name for name, f in fit["metrics"].items() if f["low"] > 1.0 and f["mean"] > 1.1]
    return f"{fit['name']}: {', '.join(told)}{'; above 1' if above else ''}."


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['name']}: " + ", ".join(f"{name} {m['mean']:.4g}" for name, m in row["metrics"].items())


def _figure(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Plot seconds and memory by N on logarithmic axes, with one line per mode and method."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(15, 4.5), layout="constrained")
    shown = {
        "CPU seconds a round": "CPU seconds a round",
        "grown MB": "memory grown by, MB",
        "seconds beyond the training": "simulated: seconds beyond the training",
    }
    for at, (metric, label) in enumerate(shown.items(), 1):
        panel = canvas.add_subplot(1, 3, at, xlabel="sites N", ylabel=label, xscale="log", yscale="log")
        for name, rows in groups.items():
            if metric in rows[0]["metrics"]:
                values = [max(row["metrics"][metric]["mean"], 1e-3) for row in rows]
                panel.plot([row["sites"] for row in rows], values, label=name, marker=".")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    drawn = io.BytesIO()
    canvas.savefig(drawn, format="png", dpi=110)
    return drawn.getvalue()
