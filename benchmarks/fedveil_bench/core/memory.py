"""Measure the peak memory of every process in a federation over gRPC, and a round's seconds outside local training.

Peaks come from the kernel (VmHWM), so none is missed between two readings. Each run has its own federation.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.common import bases
from fedveil_bench.process_monitor.usage import PROGRAMS, ProcessUsage, classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SERVER, _WORKER = "ServerApp", "worker"
_STATES = {"adamw": 2.0, "adamw-8bit": 0.5}  # optimizer states, in bytes per byte of fp32 weights
_SERVER_TIMES, _SERVER_MB = 3.0, 600  # the requirement if all weights are trained
_WORKER_TIMES, _WORKER_MB = 1.25, 800


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return one row per run: peak MB by process, seconds of a round, and the part outside training.

    Raises:
        ConfigError: there is no launcher, or a run did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/memory: expected a launcher, found none; run it as `fedveil bench core/memory`")
    rows, verdicts = [], []
    for name in settings["only"]:
        about = settings["runs"][name]
        with tempfile.TemporaryDirectory() as scratch:
            base = bases.random_gpt2(Path(scratch) / "base", settings["bases"][about["base"]])
            config = settings["config"] | about["config"] | {"task.model": str(base)}
            row = _row(name, config, Path(scratch), settings, options)
            row["base_bytes"] = 2 * (base / "model.safetensors").stat().st_size  # fp16 on disk, fp32 in memory
        options.say(f"{name}: " + ", ".join(f"{key} {m['mean']:.0f}" for key, m in row["metrics"].items()))
        rows.append(row)
        verdicts.append(_verdict(row, config))
    return BenchOutcome(rows, verdicts)


def _row(
    name: str, config: dict[str, Any], scratch: Path, settings: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    sites, data, launch = settings["sites"], resources.data_folder("e2e"), options.launch
    assert launch is not None
    named = [launch.LocalSite(f"site-{i}", data) for i in range(sites)]
    config |= {
        "run.dir": str(scratch),
        "run.name": "run",
        "run.rounds": settings["rounds"],
        "task.evaluation": str(data),
    }
    config |= {"cohort.sites": sites, "cohort.min-sites": sites}
    file, ends = scratch / "run" / "metrics.jsonl", dict[int, float]()
    with (
        launch.LocalDeployment(named) as federation,
        ProcessUsage(federation.processes.alive, classify_program, 0.25) as usage,
    ):
        mark = lambda status: ends.setdefault(len(_lines(file)), usage.timeline[-1][0])  # noqa: E731
        ended = federation.wait(federation.run(None, config), 3600, mark)
    if not ended.completed:
        raise ConfigError(f"{name}: expected a completed run, found: {ended.reason}")
    lines = _lines(file)
    trained = [max(report["train_seconds"] for report in line["reports"].values()) for line in lines]
    outside = [line["seconds"] - seconds for line, seconds in zip(lines, trained, strict=True)]
    whole = [later - earlier for earlier, later in itertools.pairwise(at for n, at in sorted(ends.items()) if n)]
    metrics = {
        f"{kind} MB": confidence_interval([max(highs)]) for kind in PROGRAMS.values() if (highs := usage.highs(kind))
    }
    metrics["all at once MB"] = confidence_interval([max(sum(mb.values()) for _, mb in usage.timeline)])
    metrics |= {
        "training s": confidence_interval(trained[1:] or trained),
        "outside s": confidence_interval(outside[1:] or outside),
    }
    metrics |= {"round with scoring s": confidence_interval(whole)} if whole else {}
    counts = {"upload_bytes": lines[-1]["upload_bytes"], "download_bytes": lines[-1]["download_bytes"]}
    return {"name": name, "rounds": len(lines), "metrics": metrics, **counts}


def _verdict(row: dict[str, Any], config: dict[str, Any]) -> str:
    base_mb = row["base_bytes"] / 1e6
    server, worker = (row["metrics"][f"{kind} MB"]["mean"] for kind in (_SERVER, _WORKER))
    outside = f"{row['metrics']['outside s']['mean']:.0f} s of a round outside training"
    if "LoRA" in row["name"]:
        return (
            f"{row['name']} (base of {base_mb:.0f} MB): ServerApp {server:.0f} MB, worker {worker:.0f} MB: the base "
            f"{(worker - _WORKER_MB) / base_mb:.2f} times on top of {_WORKER_MB} MB; {outside}."
        )
    allowed = _SERVER_TIMES * base_mb + _SERVER_MB
    held = (2.0 + _STATES[config.get("train.optimizer", "adamw")]) * base_mb
    most = _WORKER_TIMES * held + _WORKER_MB
    return (
        f"{row['name']} (weights of {base_mb:.0f} MB): ServerApp {server:.0f} MB (asked: at most {allowed:.0f}), "
        f"worker {worker:.0f} MB (asked: at most {most:.0f}); {outside}."
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["round"] >= 0]
