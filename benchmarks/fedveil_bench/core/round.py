"""Measure a no-op round: FedVeil and stock Flower alternate with the same payload, for several numbers of sites.

The figures are the round's seconds, and the CPU seconds of one site's processes, by program. The worker is reported
separately: its CPU time is the work itself, while the other programs' CPU time is the cost of a message. Stock Flower
runs with its own programs and waiting times, and its CPU figure is the mean over all rounds. All other figures exclude
each run's first round, which waits for the sites.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.errors import ConfigError
from fedveil.records import disclosure_ledger
from fedveil_bench.process_monitor.no_op import NoOp, NoOpRun, held_to, with_median
from fedveil_bench.process_monitor.usage import classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SITE = "site-0"  # the site whose processes are watched


_WORKER = "worker"


@dataclass(frozen=True)
class PairedRound:
    """FedVeil's and stock Flower's measurements for the same number of sites.

    Attributes:
        ours, stock: the rounds of each system.
        upload_bytes: size of our last message.
        beyond: bytes in our largest message in addition to its payload.
    """

    ours: NoOpRun
    stock: NoOpRun
    upload_bytes: int
    beyond: int


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure two rows for each number of sites: seconds per round, and the CPU seconds of one site.

    Raises:
        ConfigError: there is no launcher, or a run did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/round: expected a launcher, found none; run it as `fedveil bench core/round`")
    pairs = {}
    for sites in settings["sites"]:
        pairs[sites] = pair = _pair(settings, options, sites)
        for name, way in (("fedveil", pair.ours), ("flower", pair.stock)):
            options.say(f"{sites} sites, {name}: {[round(s, 2) for s in way.seconds]} s")
    asked = {int(sites): float(seconds) for sites, seconds in settings["asked_seconds"].items()}
    return build_outcome(pairs, asked, float(settings["asked_cpu_seconds"]))


def _pair(settings: dict[str, Any], options: BenchOptions, sites: int) -> PairedRound:
    named = [options.launch.LocalSite(f"site-{i}", resources.data_folder("e2e")) for i in range(sites)]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named) as federation:
        config = settings["config"] | {"run.dir": scratch, "cohort.min-sites": sites, "cohort.sites": sites}
        ours = NoOp(federation, Path(scratch), config, sites, classify_program, _SITE).ours(
            "ours", settings["rounds"], {}
        )
        ledger = disclosure_ledger.read_messages(Path(scratch) / "ours" / disclosure_ledger.NAME)
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named, own_waits=True) as federation:
        bench = NoOp(federation, Path(scratch), {}, sites, classify_program, _SITE)
        stock = bench.stock("stock", settings["rounds"], ours.payload_bytes)
    beyond = max(message["bytes"] - message["payload_bytes"] for message in ledger)
    return PairedRound(ours, stock, ledger[-1]["bytes"], beyond)


def beside_worker(way: NoOpRun) -> list[float]:
    """Return the CPU seconds of a site's processes other than the worker, by round."""
    return [sum(seconds for kind, seconds in of.items() if kind != _WORKER) for of in way.cpu]


def build_outcome(
    pairs: Mapping[int, PairedRound], asked_seconds: Mapping[int, float], asked_cpu: float
) -> BenchOutcome:
    """Build the rows and verdicts.

    Args:
        pairs: measurements by number of sites.
        asked_seconds: maximum seconds per round, by number of sites; other numbers of sites get no verdict.
        asked_cpu: maximum CPU seconds per round for a site's processes other than the worker.
    """
    rows, said = [], []
    for sites, pair in pairs.items():
        ours, theirs = _row(f"fedveil, {sites} sites", pair.ours), _row(f"flower, {sites} sites", pair.stock)
        payload = pair.ours.payload_bytes
        rows += [ours | {"upload_bytes": pair.upload_bytes, "payload_bytes": payload}, theirs]
        took, cpu = ours["metrics"]["seconds_a_round"], ours["metrics"]["cpu_seconds_beside_worker"]
        their, their_cpu = (theirs["metrics"][name] for name in ("seconds_a_round", "cpu_seconds_beside_worker"))
        most = asked_seconds.get(sites)
        bound = f" (asked: at most {most:g} s: {held_to(took, most)})" if most is not None else ""
        said += [
            f"{sites} sites: a round that trains nothing takes {took['mean']:.2f} s{bound}, stock Flower's with the "
            f"same {payload} bytes {their['mean']:.2f} s.",
            f"{sites} sites: a site's processes other than the worker need {cpu['mean']:.2f} CPU-seconds a round "
            f"(asked: at most {asked_cpu:g}: {held_to(cpu, asked_cpu)}), stock Flower's {their_cpu['mean']:.2f}.",
            f"{sites} sites: a message has at most {pair.beyond} bytes beyond its payload: "
            f"{pair.beyond / payload:.3%} (asked: below 1 % at 1 MB).",
        ]
    return BenchOutcome(rows, said)


def _row(name: str, way: NoOpRun) -> dict[str, Any]:
    programs = sorted({kind for of in way.cpu for kind in of})
    by_program = {f"CPU s {kind}": with_median([of.get(kind, 0.0) for of in way.cpu]) for kind in programs}
    metrics = {
        "seconds_a_round": with_median(way.seconds),
        "cpu_seconds_beside_worker": with_median(beside_worker(way)),
    }
    return {"name": name, "rounds": len(way.seconds), "metrics": metrics | by_program}
