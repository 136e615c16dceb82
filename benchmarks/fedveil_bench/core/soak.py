"""Soak test: many rounds over gRPC, measuring every process's memory, open files and threads, and disk use.

Measurements are taken after each round. Long-lived processes are identified by owner, kind and ID; a client process
lives for only one round, so only the number alive at one time is counted. Slopes exclude the first rounds, in which
caches fill. A leak never stops, so a value is reported as growing only if it also grows in the second half of the
rounds. Ctrl-C ends the run, and the rounds completed so far are used.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.common.growth_rates import slope_by_round, thin_curve
from fedveil_bench.process_monitor.usage import HeldResources, classify_program, read_command_line
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SUPERLINK = "superlink"
# The memory slope uses RSS, because PSS also depends on which other processes on the machine share the pages.
_A_ROUND = {"rss_mb": ("RSS KB a round", 1000.0), "files": ("files a round", 1.0), "threads": ("threads a round", 1.0)}
_LATER = ", second half"
_SAY_EVERY = 10


@dataclass
class ProcessSamples:
    """The measurements after each round.

    Attributes:
        held: measurements by process ("site-0 worker 4711"), for each round in which it was alive.
        alive: number of processes.
        disk: bytes in the run folder, and in the federation's folder (logs, keys, private state).
    """

    held: dict[str, list[HeldResources]] = field(default_factory=dict)
    alive: list[int] = field(default_factory=list)
    disk: dict[str, list[int]] = field(default_factory=dict)

    def take(self, federation: Any, run: Path) -> None:
        """Take one more sample."""
        alive = 0
        for owner in (_SUPERLINK, *federation.sites):
            for process in federation.processes.alive(owner):
                alive += 1
                with suppress(psutil.Error):  # the process may have ended in the meantime
                    name = f"{owner} {classify_program(read_command_line(process))} {process.pid}"
                    self.held.setdefault(name, []).append(HeldResources.of(process))
        self.alive.append(alive)
        for name, folder in (("run folder", run), ("federation's folder", federation.folder)):
            self.disk.setdefault(name, []).append(_bytes_in(folder))

    def stayed(self, from_round: int) -> dict[str, list[HeldResources]]:
        """Return the processes that lived from `from_round` to the end, without IDs in their names if still unique."""
        rounds = len(self.alive)
        found = {name: held[from_round - rounds :] for name, held in self.held.items() if len(held) == rounds}
        short = [name.rpartition(" ")[0] for name in found]
        return {s if short.count(s) == 1 else n: held for s, (n, held) in zip(short, found.items(), strict=True)}


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return one row per process, one for all processes and one per folder: size and slope per round.

    Raises:
        ConfigError: there is no launcher, or the run failed or was stopped before a slope could be measured.
    """
    if options.launch is None:
        raise ConfigError("core/soak: expected a launcher, found none; run it as `fedveil bench core/soak`")
    sites, data = settings["sites"], resources.data_folder("e2e")
    named = [options.launch.LocalSite(f"site-{i}", data) for i in range(sites)]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named) as federation:
        config = settings["config"] | {"run.dir": scratch, "run.name": "soak", "run.rounds": settings["rounds"]}
        config |= {"cohort.sites": sites, "cohort.min-sites": sites, "task.evaluation": str(data)}
        samples = _sampled(federation, config, options)
    least, out = settings["left_out"] + 6, settings["left_out"]
    if len(samples.alive) < least:
        raise ConfigError(f"core/soak: expected {least} rounds or more, found {len(samples.alive)}; let it run longer")
    rows = _rows(samples, out)
    return BenchOutcome(rows, _verdicts(samples, rows, out), files={"png": _curves(samples)})


def _sampled(federation: Any, config: Mapping[str, Any], options: BenchOptions) -> ProcessSamples:
    folder = Path(config["run.dir"]) / config["run.name"]
    file, samples = folder / "metrics.jsonl", ProcessSamples()

    def look(status: Mapping[str, Any]) -> None:
        rounds = sum(b'"accepted"' in line for line in file.read_bytes().splitlines()) if file.exists() else 0
        if len(samples.alive) < rounds:
            samples.take(federation, folder)
            if rounds % _SAY_EVERY == 0:
                options.say(f"{rounds} rounds: {samples.alive[-1]} processes, {_whole_mb(samples):.0f} MB")

    number = federation.run(None, config)
    try:
        ended = federation.wait(number, 60.0 * config["run.rounds"], look)
    except KeyboardInterrupt:
        options.say(f"stopped after {len(samples.alive)} rounds")
        return samples
    if not ended.completed:
        raise ConfigError(f"core/soak: expected a completed run, found: {ended.reason}")
    return samples


def _whole_mb(samples: ProcessSamples) -> float:
    return sum(held[-1].pss_mb for held in samples.stayed(0).values())


def _rows(samples: ProcessSamples, out: int) -> list[dict[str, Any]]:
    rows = []
    for name, held in sorted(samples.stayed(out).items()):
        series = {key: [float(asdict(one)[key]) for one in held] for key in _A_ROUND}
        metrics = {"RSS MB": confidence_interval([held[-1].rss_mb]), "PSS MB": confidence_interval([held[-1].pss_mb])}
        metrics["files"] = confidence_interval([float(held[-1].files)])
        for key, (title, unit) in _A_ROUND.items():
            metrics[title] = slope_by_round([unit * value for value in series[key]])
            later = series[key][len(held) // 2 :]
            metrics[f"{title}{_LATER}"] = slope_by_round([unit * value for value in later])
        curve = {"rss_mb": thin_curve(series["rss_mb"]), "files": thin_curve(series["files"])}
        rows.append({"name": name, "rounds": len(held), "metrics": metrics, "curve": curve})
    counts = [float(n) for n in samples.alive[out:]]
    alive = {"processes": confidence_interval(counts), "processes a round": slope_by_round(counts)}
    rows.append({"name": "all processes", "rounds": len(counts), "metrics": alive})
    for name, sizes in samples.disk.items():
        grown = slope_by_round([size / 1000 for size in sizes[out:]])
        about = {"MB at the end": confidence_interval([sizes[-1] / 1e6]), "disk KB a round": grown}
        rows.append({"name": name, "rounds": len(counts), "metrics": about})
    return rows


def _verdicts(samples: ProcessSamples, rows: Sequence[Mapping[str, Any]], out: int) -> list[str]:
    rounds = len(samples.alive)
    lines = [f"{rounds} rounds, of which the first {out} are in no slope; slopes are through the means of ten blocks."]
    for row in rows:
        for title, _ in _A_ROUND.values():
            found, later = (row["metrics"].get(name) for name in (title, f"{title}{_LATER}"))
            if found and later and min(found["low"], later["low"]) > 0:
                told = (f"{slope['mean']:.3g} [{slope['low']:.3g}, {slope['high']:.3g}]" for slope in (found, later))
                lines.append(f"{row['name']} grows: {title} {', in the second half '.join(told)}.")
    if len(lines) == 1:
        lines.append("No process's memory, open files or threads grow through both halves of the rounds.")
    stayed = {name.rpartition(" ")[0] for name, held in samples.held.items() if len(held) == rounds}
    for name in sorted({name.rpartition(" ")[0] for name in samples.held} - stayed):
        found = [held for known, held in samples.held.items() if known.rpartition(" ")[0] == name]
        lines.append(
            f"{name}: {len(found)} of them came and went, each seen after at most {max(map(len, found))} rounds."
        )
    return lines


def _curves(samples: ProcessSamples) -> bytes:
    """Plot memory and open files by round, with one line per process."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(11, 4), layout="constrained")
    for at, (key, label) in enumerate((("rss_mb", "RSS, MB"), ("files", "open files")), 1):
        panel = canvas.add_subplot(1, 2, at, xlabel="round", ylabel=label)
        for name, held in sorted(samples.stayed(0).items()):
            panel.plot([float(asdict(one)[key]) for one in held], label=name, linewidth=1)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawn = io.BytesIO()
    canvas.savefig(drawn, format="png", dpi=110)
    return drawn.getvalue()


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # the file may disappear in the meantime
            total += file.stat().st_size if file.is_file() else 0
    return total
