"""Measure what the warm worker saves and costs in no-op rounds, compared with no worker and with stock Flower.

Small messages: CPU seconds of a site and wall-clock time per round. A large base: loading time. A large message: number
of copies in the client process and the worker together. All FedVeil cases share one federation; the stock Flower cases
share another federation, with its own programs and waiting times. Each run's first round is excluded.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.common import bases
from fedveil_bench.process_monitor.no_op import NoOp, NoOpRun, read_rounds, with_median
from fedveil_bench.process_monitor.usage import classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SITE = "site-0"  # the site whose memory is watched


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return rows for small messages in three modes, the large base, and the large message in two modes.

    Raises:
        ConfigError: there is no launcher, or a run did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/worker: expected a launcher, found none; run it as `fedveil bench core/worker`")
    rounds, sites = settings["rounds"], settings["sites"]
    named = [options.launch.LocalSite(f"site-{i}", resources.data_folder("e2e")) for i in range(sites)]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named) as federation:
        folder = Path(scratch)
        config = settings["config"] | {"run.dir": scratch, "cohort.sites": sites, "cohort.min-sites": sites}
        bench = NoOp(federation, folder, config, sites, _kind, _SITE)
        small = {
            "worker": bench.ours("worker", rounds, {}),
            "no worker": bench.ours("cold", rounds, {"client.worker": False}),
        }
        base = bases.random_gpt2(folder / "gpt2", settings["base"])
        base_mb = sum(file.stat().st_size for file in base.iterdir()) / 1e6
        bench.ours("base", rounds, {"task.model": str(base)})
        turns = federation.folder / "sites" / _SITE / "workers" / _SITE / "turns.jsonl"
        loads = [line["load_seconds"] for line in read_rounds(turns) if line["run"].startswith("base-")]
        options.say(f"base of {base_mb:.0f} MB: {loads} s of loading")
        narrow = bases.random_gpt2(folder / "narrow", settings["narrow_base"])
        rank = f"adapter = {{kind = 'lora', rank = {settings['large_rank']}}}"
        changes = {"task.model": str(narrow), "method.params": rank}
        large = {"worker": bench.ours("large", settings["large_rounds"], changes, every=0.01)}
        payload = large["worker"].payload_bytes
        held_turns = [line for line in read_rounds(turns) if line["run"].startswith("large-")]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalDeployment(named, own_waits=True) as federation:
        bench = NoOp(federation, Path(scratch), config, sites, _kind, _SITE)
        small["flower"] = bench.stock("flower", rounds, small["worker"].payload_bytes)
        large["flower"] = bench.stock("large-flower", settings["large_rounds"], payload, every=0.01)
    for name, way in small.items():
        options.say(f"{name}: {_rounded(way.seconds)} s, {_rounded(way.cpu_seconds)} CPU-s")
    copies = {
        "worker": _copies(large["worker"], _median_peak(small["worker"]), held_turns),
        "flower": _copies(large["flower"], _median_peak(small["flower"])),
    }
    options.say(f"{payload} bytes each way: {copies} times in memory")
    rows = [_row(name, way) for name, way in small.items()]
    held = {"load_seconds_first": confidence_interval(loads[:1]), "load_seconds": with_median(loads[1:])}
    rows.append({"name": f"worker, base of {base_mb:.0f} MB", "rounds": len(loads) - 1, "metrics": held})
    for name, way in large.items():
        row = _row(f"{name}, {payload / 1e6:.0f} MB each way", way)
        row["metrics"] |= {
            f"copies_{phase}": confidence_interval([most]) for phase, most in copies[name].items() if most
        }
        rows.append(row)
    return BenchOutcome(rows, _verdicts(small, loads[1:], copies, payload))


def _verdicts(
    small: dict[str, NoOpRun], loads: Sequence[float], copies: dict[str, dict[str, float]], payload: int
) -> list[str]:
    warm, cold, flower = (small[name] for name in ("worker", "no worker", "flower"))
    share = statistics.median(warm.cpu_seconds) / statistics.median(cold.cpu_seconds)
    more = statistics.median(warm.seconds) - statistics.median(flower.seconds)
    return [
        f"CPU of the client side, a round: {share:.2f} of that without the worker (asked: at most 0.20).",
        (
            f"Wall time of a round: {more:+.1f} s compared with stock Flower's no-op of the same payload (asked: at "
            "most +1.5 s)."
        ),
        f"Loading in second and later rounds: at most {max(loads):.4f} s (asked: below 0.1 s).",
        f"The client process peaks at {max(warm.usage.peaks(_SHIM)):.0f} MB (asked: below 150 MB).",
        f"At {payload / 1e6:.0f} MB each way the client process and the worker together hold the payload at most "
        f"{copies['worker']['turn']:.2f} times while it is decoded, trained from and packed, and "
        f"{copies['worker']['flower']:.2f} times while Flower pulls and pushes it (asked: at most 2); stock Flower's "
        f"client process alone holds it {copies['flower']['flower']:.2f} times.",
    ]


_SHIM, _WORKER = "client process", "worker"


def _kind(command: list[str]) -> str:
    kind = classify_program(command)
    return kind if kind in (_SHIM, _WORKER) else "supernode"


def _median_peak(way: NoOpRun) -> float:
    return statistics.median(way.usage.peaks(_SHIM))


def _copies(way: NoOpRun, shim_mb: float, turns: Sequence[dict[str, Any]] = ()) -> dict[str, float]:
    """Return the maximum number of payload copies that the client process and the worker held together at one time.

    Computed from their memory in excess of a client process with a small message and a worker between two client
    rounds, starting with the second client round, when the worker has its model.

    Separately for "turn", FedVeil's work in the worker, and "flower", in which the client process pulls, inflates and
    pushes messages.
    """
    timeline = way.usage.timeline
    first = next(i for i, (_, mb) in enumerate(timeline) if mb.get(_SHIM))
    between = next(i for i in range(first, len(timeline)) if not timeline[i][1].get(_SHIM))
    idle_mb = min(mb.get(_WORKER, 0.0) for _, mb in timeline[between:] if not mb.get(_SHIM))
    most = {"turn": 0.0, "flower": 0.0}
    for at, mb in timeline[between:]:
        phase = "turn" if any(line["time"] - line["seconds"] <= at <= line["time"] for line in turns) else "flower"
        beyond = max(0.0, mb.get(_SHIM, 0.0) - shim_mb) + mb.get(_WORKER, 0.0) - idle_mb
        most[phase] = max(most[phase], beyond * 1e6 / way.payload_bytes)
    return most


def _row(name: str, way: NoOpRun) -> dict[str, Any]:
    return {
        "name": name,
        "rounds": len(way.seconds),
        "payload_bytes": way.payload_bytes,
        "metrics": {
            "seconds_a_round": with_median(way.seconds),
            "cpu_seconds_a_site": with_median(way.cpu_seconds),
            "client_process_mb": with_median(way.usage.peaks(_SHIM)),
        },
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 2) for value in values]
