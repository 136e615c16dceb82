"""Measure the cost of signatures in a no-op round: the same federation, alternately with and without them.

Both variants have a guard at each site, so that they differ only in the signatures. The first round of each run is
excluded, because it waits for the sites.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.process_monitor.no_op import NoOp, NoOpRun, held_to, with_median
from fedveil_bench.process_monitor.usage import classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

WAYS = {"unsigned": False, "signed": True}
RATIO = "signed / unsigned"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row per variant, with the seconds and all processes' CPU seconds per round, and a row with the ratios.

    Raises:
        ConfigError: there is no launcher, or a run did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/signatures: expected a launcher, found none; run it as `fedveil bench core/signatures`")
    runs: dict[str, list[NoOpRun]] = {name: [] for name in WAYS}
    for repeat in range(settings["repeats"]):
        for name in sorted(WAYS, reverse=bool(repeat % 2)):  # so that the variants take turns at running first
            runs[name].append(_run(settings, options, signed=WAYS[name]))
            options.say(f"{name}: {[round(s, 2) for s in runs[name][-1].seconds]} s")
    return build_outcome(runs, float(settings["asked_ratio"]))


def _run(settings: dict[str, Any], options: BenchOptions, signed: bool) -> NoOpRun:
    sites = settings["sites"]
    named = [options.launch.LocalSite(f"site-{i}", resources.data_folder("e2e")) for i in range(sites)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        options.launch.LocalDeployment(named, guarded=True, signed=signed) as federation,
    ):
        config = settings["config"] | {"run.dir": scratch, "cohort.min-sites": sites, "cohort.sites": sites}
        return NoOp(federation, Path(scratch), config, sites, classify_program).ours("ours", settings["rounds"], {})


def build_outcome(runs: Mapping[str, Sequence[NoOpRun]], asked: float) -> BenchOutcome:
    """Return rows and verdicts. `asked`: the maximum time for a signed round, as a multiple of an unsigned round.

    Only ratios between consecutive runs are judged, because seconds alone depend on what else the machine was doing.
    """
    rows = []
    for name, repeats in runs.items():
        seconds = [second for run in repeats for second in run.seconds]
        cpu = [second for run in repeats for second in run.cpu_seconds]
        metrics = {"seconds_a_round": with_median(seconds), "cpu_seconds_a_round": with_median(cpu)}
        rows.append({"name": name, "rounds": len(seconds), "metrics": metrics})
    ratio = confidence_interval(_divide_medians(runs, lambda run: run.seconds))
    cpu_ratio = confidence_interval(_divide_medians(runs, lambda run: run.cpu_seconds))
    rows.append({"name": RATIO, "metrics": {"seconds_a_round": ratio, "cpu_seconds_a_round": cpu_ratio}})
    payload = runs["signed"][0].payload_bytes
    medians = [statistics.median([s for run in runs[name] for s in run.seconds]) for name in WAYS]
    return BenchOutcome(
        rows,
        [
            f"A round that trains nothing, with messages of {payload} bytes, takes {ratio['mean']:.3f} times as long "
            f"with signatures ({ratio['low']:.3f} to {ratio['high']:.3f} over {ratio['n']} pairs of runs; asked: at "
            f"most {asked:g}: {held_to(ratio, asked)}): medians {medians[1]:.2f} s and {medians[0]:.2f} s.",
            f"It takes {cpu_ratio['mean']:.3f} times the CPU seconds of all processes ({cpu_ratio['low']:.3f} to "
            f"{cpu_ratio['high']:.3f}; asked: at most {asked:g}: {held_to(cpu_ratio, asked)}).",
        ],
    )


def _divide_medians(runs: Mapping[str, Sequence[NoOpRun]], values: Callable[[NoOpRun], Sequence[float]]) -> list[float]:
    """Divide each signed run's median by the median of the unsigned run in the same pair."""
    pairs = zip(runs["signed"], runs["unsigned"], strict=True)
    return [statistics.median(values(signed)) / statistics.median(values(unsigned)) for signed, unsigned in pairs]
