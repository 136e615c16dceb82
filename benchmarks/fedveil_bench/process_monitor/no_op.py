"""Watch no-op rounds of FedVeil and stock Flower, to find out where the time goes."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil.records import disclosure_ledger
from fedveil_bench import folders
from fedveil_bench.common import verdicts
from fedveil_bench.process_monitor.usage import ProcessUsage


@dataclass
class NoOpRun:
    """The measurements of one run.

    Attributes:
        seconds: duration of each round except the first.
        cpu: CPU seconds by kind of process for each round except the first; for stock Flower, the mean over all rounds.
        usage: all measurements.
        payload_bytes: payload bytes in one message.
    """

    seconds: list[float]
    cpu: list[dict[str, float]]
    usage: ProcessUsage
    payload_bytes: int

    @property
    def cpu_seconds(self) -> list[float]:
        """Return the CPU seconds of all kinds of processes together."""
        return [sum(of.values()) for of in self.cpu]


@dataclass
class NoOp:
    """Runs no-op rounds in a federation.

    Attributes:
        federation: the running federation.
        folder: the folder for the runs.
        config: FedVeil's config.
        sites: number of participating sites.
        kind: returns the kind of a watched process.
        watched: the site whose processes are watched, or "" for all processes of the federation.
    """

    federation: Any
    folder: Path
    config: dict[str, Any]
    sites: int
    kind: Callable[[list[str]], str]
    watched: str = ""

    def ours(self, name: str, rounds: int, changes: dict[str, Any], every: float = 0.1) -> NoOpRun:
        """Run FedVeil. Raises ConfigError if it does not complete."""
        file = self.folder / name / "metrics.jsonl"
        overrides = self.config | changes | {"run.rounds": rounds + 1, "run.name": name}
        usage, cpu = self._watch(None, overrides, file, every)
        seconds = [m["seconds"] for m in read_rounds(file) if m["round"] > 0]
        return NoOpRun(
            seconds,
            cpu,
            usage,
            disclosure_ledger.read_messages(self.folder / name / disclosure_ledger.NAME)[-1]["payload_bytes"],
        )

    def stock(self, name: str, rounds: int, payload: int, every: float = 0.1) -> NoOpRun:
        """Run stock Flower with `payload` bytes. Raises ConfigError if it does not complete."""
        out = self.folder / f"{name}.json"
        overrides = {"bytes": payload, "rounds": rounds + 1, "sites": self.sites, "out": str(out)}
        usage, _ = self._watch(folders.find_folder("core/stock_flower"), overrides, None, every)
        cpu = {kind: seconds / (rounds + 1) for kind, seconds in usage.cpu_by_kind().items()}
        return NoOpRun(json.loads(out.read_text())[1:], [cpu], usage, payload)

    def _watch(
        self, app: Path | None, overrides: dict[str, Any], rounds: Path | None, every: float
    ) -> tuple[ProcessUsage, list[dict[str, float]]]:
        """Watch the run; return it with the CPU seconds between the ends of rounds, which are lines in `rounds`."""
        marks: dict[int, dict[str, float]] = {}
        with ProcessUsage(lambda: self.federation.processes.alive(self.watched or None), self.kind, every) as usage:
            ended = self.federation.wait(
                self.federation.run(app, overrides),
                1800,
                lambda status: marks.setdefault(len(read_rounds(rounds)) if rounds else 0, usage.cpu_by_kind()),
            )
        if not ended.completed:
            raise ConfigError(f"{(app.name if app else 'fedveil')}: expected a completed run, found: {ended.reason}")
        ends = [marks[n] for n in sorted(marks) if n > 0]
        return usage, [_less(later, earlier) for earlier, later in itertools.pairwise(ends)]


def _less(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    before = defaultdict(float, earlier)
    return {kind: seconds - before[kind] for kind, seconds in later.items()}


def with_median(values: Sequence[float]) -> dict[str, float]:
    """Return an interval with its median."""
    return {**confidence_interval(values), "median": statistics.median(values)}


def held_to(found: Mapping[str, float], at_most: float) -> str:
    """Return a verdict on whether a mean is within a bound, which requires the whole interval to lie on one side."""
    if found["n"] > 1 and found["high"] <= at_most:
        return verdicts.HOLDS
    return verdicts.FAILS if found["n"] > 1 and found["low"] > at_most else verdicts.OPEN


def read_rounds(file: Path) -> list[dict[str, Any]]:
    """Return the rounds in a metrics.jsonl; [] if there is no such file yet."""
    return (
        [line for line in map(json.loads, file.read_text().splitlines()) if line["round"] >= 0] if file.exists() else []
    )
