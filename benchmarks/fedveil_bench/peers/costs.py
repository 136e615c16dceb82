"""The results of one run in the comparison: loss, costs, and what the server observed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedveil.errors import ConfigError
from fedveil_bench.process_monitor.usage import ProcessUsage, classify_program

T = TypeVar("T")
COSTS = ("s a round", "s", "MB up", "MB down", "server MB", "site MB")
TIMEOUT = 3600.0  # seconds allowed for one run


@dataclass(frozen=True)
class PeerRun:
    """The result of one run.

    Attributes:
        scores: values by the metric names in e2e.py.
        seen: what the server sees in each upload: "A and B", "A alone" or "B alone".
    """

    scores: Mapping[str, float]
    seen: Sequence[str]


@dataclass(frozen=True)
class PeerCosts:
    """The costs of a run: seconds, bytes up and down, and peak MB of server and site."""

    whole: float
    up: int
    down: int
    server_mb: float
    site_mb: float

    def scores(self, loss: float, seconds: Sequence[float]) -> dict[str, float]:
        """Return the scores, including the loss and the seconds per round. Raises ConfigError for a single round."""
        if len(seconds) < 2:
            raise ConfigError(f"run.rounds: expected at least 2, because the first is not timed, found {len(seconds)}")
        values = (sum(seconds[1:]) / len(seconds[1:]), self.whole, self.up / 1e6, self.down / 1e6)
        return {"loss": loss, **dict(zip(COSTS, (*values, self.server_mb, self.site_mb), strict=True))}


def measure_costs(federation: Any, server: str, site: str, run: Callable[[], T]) -> tuple[T, PeerCosts]:
    """Return the result of `run`, and its costs.

    Args:
        federation: a federation that has both processes, and a relay between them.
        server, site: names of the processes whose memory is watched.
        run: performs a complete run, starting with its submission.
    """

    def memory(name: str) -> ProcessUsage:
        return ProcessUsage(lambda: federation.processes.alive(name), classify_program, 0.5, shared=True)

    with memory(server) as of_server, memory(site) as of_site:
        up, down, began = federation.relay.up, federation.relay.down, time.monotonic()
        ended = run()
        whole = time.monotonic() - began
        up, down = federation.relay.up - up, federation.relay.down - down
    return ended, PeerCosts(whole, up, down, _peak(of_server), _peak(of_site))


def _peak(usage: ProcessUsage) -> float:
    """Return the maximum MB that all watched processes used at one time."""
    return max(sum(by_kind.values()) for _, by_kind in usage.timeline)
