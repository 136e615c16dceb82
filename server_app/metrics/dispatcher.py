"""Pass each round's metrics to sinks, each in its own thread, so that no sink can delay or end a round.

| a sink ... | result |
|---|---|
| raises | it is stopped with its error |
| takes more than `MOST_SECONDS` for an attempt, or has `MOST_WAITING` attempts in its queue | it is stopped |
| has not written its last metrics `END_SECONDS` after the run's end, `FAILED_SECONDS` after a failure | it is stopped |
| is stopped | the log and status.json ("sinks") have the reason; it gets no more metrics; the rounds continue |

Threads cannot be killed: a thread that hangs keeps its resources until the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from logging import WARNING, getLogger
from queue import SimpleQueue
from typing import Protocol, final

from fedveil.sanitize import sanitize
from fedveil.server_app.metrics.samples import RoundMetrics

log = getLogger("flwr").log  # Flower's own logger; a run in one process has no Flower

MOST_SECONDS = 120.0  # creating MLflow's tables takes ten seconds on a slow machine
END_SECONDS = 30.0
FAILED_SECONDS = 5.0  # for a run that fails or is stopped: Flower does not wait long
MOST_WAITING = 100
_REASON_CHARACTERS = 300


class MetricsSink(Protocol):
    """A destination for metrics. Both calls come from the same thread and may raise."""

    def write(self, told: RoundMetrics) -> None:
        """Write one attempt's metrics."""
        ...

    def close(self, state: str) -> None:
        """End the run as "completed" or "failed". Also called for a sink that raised."""
        ...


Clock = Callable[[], float]


@final
class _Outlet:
    """One sink and its thread."""

    def __init__(self, name: str, sink: MetricsSink, clock: Clock) -> None:
        self.name, self.ended, self.logged = name, "", False
        self._sink, self._clock = sink, clock
        self._waiting: SimpleQueue[RoundMetrics | str] = SimpleQueue()
        self._since: float | None = None  # start of the current attempt
        self.thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self.thread.start()

    def put(self, item: RoundMetrics | str) -> None:
        """Pass on metrics, or the run's final state, unless the sink was stopped."""
        if self.over():
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self.ended = f"{MOST_WAITING} attempts are waiting for it; it is too slow"
            return
        self._waiting.put(item)

    def over(self) -> str:
        """Return why the sink was stopped; "" if it was not."""
        since = self._since
        if not self.ended and since is not None and self._clock() - since > MOST_SECONDS:
            self.ended = f"it has spent more than {MOST_SECONDS:g} s on one attempt"
        return self.ended

    def _serve(self) -> None:
        state = "failed"
        try:
            while not self.ended:
                item = self._waiting.get()
                self._since = self._clock()
                if isinstance(item, str):
                    state = item
                    break
                self._sink.write(item)
                self._since = None
        except BaseException as error:  # any error, even SystemExit: it concerns only the sink
            self.ended = self.ended or sanitize(f"{type(error).__name__}: {error}", _REASON_CHARACTERS)
        try:
            self._sink.close(state)
        except BaseException as error:
            self.ended = self.ended or sanitize(f"at its end: {type(error).__name__}: {error}", _REASON_CHARACTERS)
        self._since = None


@final
class MetricsDispatcher:
    """The sinks of a run, by name.

    Args:
        accountant: creates a sink that passes additional metrics to the other sinks; its name is "epsilon".
        clock: can be replaced in tests.
    """

    def __init__(
        self,
        sinks: Mapping[str, MetricsSink],
        accountant: Callable[[Callable[[RoundMetrics], None]], MetricsSink] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._sinks = [_Outlet(name, sink, clock) for name, sink in sinks.items()]
        first = [_Outlet("epsilon", accountant(self._hand), clock)] if accountant and sinks else []
        self._all = [*first, *self._sinks]

    def __bool__(self) -> bool:
        return bool(self._all)

    def put(self, told: RoundMetrics) -> None:
        """Pass the metrics to every sink. Returns immediately."""
        for outlet in self._all:
            outlet.put(told)

    def _hand(self, told: RoundMetrics) -> None:
        for outlet in self._sinks:
            outlet.put(told)

    def ended(self) -> dict[str, str]:
        """Return why sinks were stopped, by name. The first call after a sink was stopped also logs it."""
        reasons = {outlet.name: why for outlet in self._all if (why := outlet.over())}
        for outlet in self._all:
            if outlet.name in reasons and not outlet.logged:
                outlet.logged = True
                log(WARNING, "sinks: %s was stopped: %s; the rounds continue", outlet.name, reasons[outlet.name])
        return reasons

    def close(self, state: str) -> None:
        """Let the sinks flush their queued metrics, within one time limit for all of them."""
        seconds = END_SECONDS if state == "completed" else FAILED_SECONDS
        end = self._clock() + seconds
        for last in (self._all[: -len(self._sinks)], self._sinks):  # the accountant still passes metrics to the others
            for outlet in last:
                outlet.put(state)
            for outlet in last:
                if outlet.ended:
                    continue
                outlet.thread.join(max(0.0, end - self._clock()))
                if outlet.thread.is_alive():
                    outlet.ended = f"it did not write everything within {seconds:g} s after the run ended"
