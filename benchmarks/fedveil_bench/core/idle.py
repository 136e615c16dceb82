"""Measure the cost of a waiting site: its processes' share of one CPU core, for FedVeil and stock Flower.

The federation has one site. The first seconds are excluded, because processes are starting and pollers begin with short
intervals (fedveil/guard/poll_backoff.py). Then the CPU seconds per window and program are measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil_bench.process_monitor.no_op import held_to
from fedveil_bench.process_monitor.usage import ProcessUsage, classify_program
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SITE = "site-0"


@dataclass(frozen=True)
class IdleWindow:
    """A period in which a site waited.

    Attributes:
        seconds: the length of the period.
        cpu: CPU seconds by program.
    """

    seconds: float
    cpu: Mapping[str, float]

    def percent(self, kind: str | None = None) -> float:
        """Return the percentage of one core that all programs, or one program, used."""
        cpu = sum(self.cpu.values()) if kind is None else self.cpu.get(kind, 0.0)
        return 100.0 * cpu / self.seconds


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return the rows "fedveil" and "flower": percentage of one core, in total and by program.

    Raises:
        ConfigError: there is no launcher, or a site ended while waiting.
    """
    if options.launch is None:
        raise ConfigError("core/idle: expected a launcher, found none; run it as `fedveil bench core/idle`")
    found: dict[str, list[IdleWindow]] = {}
    for name, own_waits in (("fedveil", False), ("flower", True)):
        named = [options.launch.LocalSite(_SITE, resources.data_folder("e2e"))]
        with options.launch.LocalDeployment(named, own_waits=own_waits) as federation:
            time.sleep(settings["settle_seconds"])
            found[name] = []
            for _ in range(settings["windows"]):
                found[name].append(_window(federation, settings["seconds"]))
                options.say(f"{name}: {found[name][-1].percent():.3f} % of a core")
    return build_outcome(found, float(settings["asked_percent"]))


def _window(federation: Any, seconds: float) -> IdleWindow:
    started = time.monotonic()
    with ProcessUsage(lambda: federation.processes.alive(_SITE), classify_program, every=0.5) as usage:
        time.sleep(seconds)
    if not federation.processes.alive(_SITE) or federation.processes.ended(_SITE) is not None:
        raise ConfigError(
            f"core/idle: expected a waiting site, found that it ended: {federation.processes.tail(_SITE)}"
        )
    return IdleWindow(time.monotonic() - started, usage.cpu_by_kind())


def build_outcome(found: Mapping[str, Sequence[IdleWindow]], asked: float) -> BenchOutcome:
    """Return rows and verdicts from the windows of each system.

    `asked`: the maximum percentage of one core that a waiting FedVeil site should use.
    """
    rows: list[dict[str, Any]] = []
    for name, windows in found.items():
        kinds = sorted({kind for window in windows for kind in window.cpu})
        metrics = {"percent_of_a_core": confidence_interval([window.percent() for window in windows])}
        metrics |= {f"% {kind}": confidence_interval([window.percent(kind) for window in windows]) for kind in kinds}
        rows.append({"name": name, "seconds": sum(window.seconds for window in windows), "metrics": metrics})
    ours, stock = (row["metrics"]["percent_of_a_core"] for row in rows)
    return BenchOutcome(
        rows,
        [
            f"A waiting site takes {ours['mean']:.2f} % of a core ({ours['low']:.2f} to {ours['high']:.2f}; asked: at "
            f"most {asked:g} %: {held_to(ours, asked)}), stock Flower's {stock['mean']:.2f} %."
        ],
    )
