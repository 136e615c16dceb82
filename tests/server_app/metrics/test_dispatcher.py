"""No sink holds up or ends a round: one that raises, one that sleeps for ever, one that is slow, one that exits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from fedveil.server_app.metrics import dispatcher
from fedveil.server_app.metrics.dispatcher import MetricsDispatcher
from fedveil.server_app.metrics.samples import MetricSample, RoundMetrics
from tests.conftest import ROOT

TOLD = [RoundMetrics(step, (MetricSample("seconds", 1.0),), {}) for step in range(300)]


class Good:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.state = ""

    def write(self, told):
        self.steps.append(told.step)

    def close(self, state):
        self.state = state


class Sleeps(Good):
    """For ever, from its second row on, until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.began = threading.Event(), threading.Event()

    def write(self, told):
        super().write(told)
        if told.step:
            self.began.set()
            self.go.wait()


class Raises(Good):
    def __init__(self, error) -> None:
        super().__init__()
        self.error = error

    def write(self, told):
        raise self.error


def until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    "error,said",
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (ValueError("a\x1b[2J" + "x" * 900), "ValueError: a\\x1b[2Jxxx"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_sink_that_raises_is_ended_with_its_reason_and_the_others_go_on(error, said):
    good, bad = Good(), Raises(error)
    open_ = MetricsDispatcher({"good": good, "bad": bad})
    for metrics in TOLD[:3]:
        open_.put(metrics)
    until(lambda: open_.ended())
    assert list(open_.ended()) == ["bad"]
    assert open_.ended()["bad"].startswith(said)
    assert len(open_.ended()["bad"]) < 400
    open_.close("completed")
    assert (good.steps, good.state) == ([0, 1, 2], "completed")
    assert (bad.steps, bad.state) == ([], "failed")  # it could tidy up


def test_a_sink_that_sleeps_for_ever_costs_the_rounds_no_time_and_is_ended_by_the_clock():
    now = [0.0]
    asleep, good = Sleeps(), Good()
    open_ = MetricsDispatcher({"asleep": asleep, "good": good}, clock=lambda: now[0])
    started = time.monotonic()
    for metrics in TOLD[:50]:
        open_.put(metrics)
    assert time.monotonic() - started < 1
    asleep.began.wait(10)
    now[0] = dispatcher.MOST_SECONDS
    assert open_.ended() == {}
    now[0] += 0.5
    assert open_.ended() == {"asleep": "it has spent more than 120 s on one attempt"}
    open_.put(TOLD[50])
    open_.close("completed")
    assert good.steps == list(range(51))
    asleep.go.set()
    until(lambda: asleep.state)
    assert asleep.steps == [0, 1]  # what waited for it is not written later


def test_a_sink_that_is_too_slow_holds_a_bounded_number_of_rows():
    asleep = Sleeps()
    open_ = MetricsDispatcher({"slow": asleep})
    for metrics in TOLD:
        open_.put(metrics)
    assert open_.ended() == {"slow": "100 attempts are waiting for it; it is too slow"}
    asleep.go.set()


def test_a_sink_that_is_late_at_the_end_is_waited_for_but_not_for_long(monkeypatch):
    monkeypatch.setattr(dispatcher, "FAILED_SECONDS", 0.2)
    asleep, good = Sleeps(), Good()
    open_ = MetricsDispatcher({"late": asleep, "good": good})
    for metrics in TOLD[:2]:
        open_.put(metrics)
    started = time.monotonic()
    open_.close("failed")
    open_.close("failed")  # as after an error while the first one was written down
    assert time.monotonic() - started < 2
    assert open_.ended() == {"late": "it did not write everything within 0.2 s after the run ended"}
    assert good.state == "failed"
    asleep.go.set()


def test_a_process_ends_whatever_a_sink_does():
    code = """
import time
from fedveil.server_app.metrics import dispatcher
from fedveil.server_app.metrics.samples import RoundMetrics
dispatcher.END_SECONDS = 0.1
class Hangs:
    def write(self, told):
        while True:
            time.sleep(3600)
    def close(self, state): ...
open_ = dispatcher.MetricsDispatcher({"hangs": Hangs()})
open_.put(RoundMetrics(1, (), {}))
open_.close("completed")
print(open_.ended())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "did not write everything" in done.stdout, done.stderr
