"""Measure the seconds and CPU time of a no-op round with large messages, compared with stock Flower.

All processes of a federation are on this machine, so with more sites than cores, a round takes as long as the CPU
seconds of all hops together. The first round of each run is excluded.

| metric | meaning |
|---|---|
| seconds a round | by the server's clock |
| MB a second | all messages in a round, both ways, divided by these seconds |
| CPU s <program> | per round, for all its processes; for stock Flower, the mean over all rounds |
| MB <program> | maximum resident memory of any of its processes, over all rounds |

One size is run again while all of the sites' connections are cut at intervals, in the middle of a transfer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.errors import ConfigError
from fedveil_bench.common import bases
from fedveil_bench.process_monitor.no_op import NoOp, NoOpRun, with_median
from fedveil_bench.process_monitor.relay import TcpRelay, insert_relay
from fedveil_bench.process_monitor.usage import classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

_HOPS = ("ServerApp", "SuperLink", "SuperNode", "client process", "worker")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return two rows for each size: FedVeil's and stock Flower's.

    Raises:
        ConfigError: there is no launcher, or a run did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/large: expected a launcher, found none; run it as `fedveil bench core/large`")
    sites, found, cut = settings["sites"], dict[str, NoOpRun](), settings["cut"]
    named = [options.launch.LocalSite(f"site-{i}", resources.data_folder("e2e")) for i in range(sites)]

    def ours(federation: Any, sizes: list[dict[str, int]], how: str = "") -> None:
        with tempfile.TemporaryDirectory() as scratch, federation:
            base = bases.random_gpt2(Path(scratch) / "gpt2", settings["base"])
            config = settings["config"] | {"cohort.sites": sites, "cohort.min-sites": sites, "task.model": str(base)}
            bench = NoOp(federation, Path(scratch), config | {"run.dir": scratch}, sites, _kind)
            for size in sizes:
                rank = {"method.params": f"adapter = {{kind = 'lora', rank = {size['rank']}}}"}
                way = bench.ours(f"rank-{size['rank']}", size["rounds"], rank)
                found[_name("fedveil", way, how)] = way
                options.say(f"{_name('fedveil', way, how)}: {way.seconds}")

    ours(options.launch.LocalDeployment(named), settings["sizes"])
    sizes = [(way.payload_bytes, len(way.seconds)) for way in found.values()]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named, own_waits=True) as federation:
        bench = NoOp(federation, Path(scratch), {}, sites, _kind)
        for payload, rounds in sizes:
            way = bench.stock(f"bytes-{payload}", rounds, payload)
            found[_name("flower", way)] = way
            options.say(f"{_name('flower', way)}: {way.seconds}")
    cut_off = insert_relay(options.launch.LocalDeployment, lambda port: TcpRelay(port, cut["every"]))
    ours(cut_off(named), [cut], f", cut every {cut['every']} s")
    return build_outcome(found, sites)


def build_outcome(found: dict[str, NoOpRun], sites: int) -> BenchOutcome:
    """Build the table: first all our runs, then as many of stock Flower's in the same order, then the cut runs."""
    rows, ways = [_row(name, way, sites) for name, way in found.items()], list(found.values())
    half = sum(name.startswith("flower") for name in found)
    said = []
    for row, ours, stock in zip(rows, ways[:half], ways[half:], strict=False):
        mean, other = (sum(way.seconds) / len(way.seconds) for way in (ours, stock))
        hops = ", ".join(f"{hop} {row['metrics'][f'CPU s {hop}']['mean']:.1f}" for hop in _hops(ours))
        said.append(
            f"{ours.payload_bytes / 1e6:.0f} MB each way, {sites} sites: {mean:.1f} s a round, "
            f"{mean / other:.2f} times stock Flower's {other:.1f}; CPU seconds: {hops}."
        )
    for row, way in list(zip(rows, ways, strict=True))[2 * half :]:
        whole = next(one for one in ways if one.payload_bytes == way.payload_bytes)
        mean, other = (sum(one.seconds) / len(one.seconds) for one in (way, whole))
        said.append(f"{row['name']}: {mean:.1f} s a round, {mean / other:.2f} times those of an undisturbed round.")
    return BenchOutcome(rows, said)


def _row(name: str, way: NoOpRun, sites: int) -> dict[str, Any]:
    megabytes = 2 * sites * way.payload_bytes / 1e6
    metrics = {
        "seconds a round": with_median(way.seconds),
        "MB a second": with_median([megabytes / seconds for seconds in way.seconds]),
    }
    for hop in _hops(way):
        metrics[f"CPU s {hop}"] = with_median([of.get(hop, 0.0) for of in way.cpu])
    for hop in _hops(way):
        metrics[f"MB {hop}"] = with_median([max(way.usage.highs(hop), default=0.0)])
    return {"name": name, "rounds": len(way.seconds), "payload_bytes": way.payload_bytes, "metrics": metrics}


def _hops(way: NoOpRun) -> list[str]:
    return [hop for hop in _HOPS if any(of.get(hop) for of in way.cpu)]


def _name(whose: str, way: NoOpRun, how: str = "") -> str:
    return f"{whose}, {way.payload_bytes / 1e6:.0f} MB each way{how}"


def _kind(command: list[str]) -> str:
    """Return the process kind. A resident guard forks a child for each message; both count as the client."""
    kind = classify_program(command)
    return "client process" if kind == "resident" else kind
