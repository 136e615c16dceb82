"""The clock of the server's leases while the machine's clock jumps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.guard import steady_clock
from fedveil.guard.steady_clock import SteadyClock

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
LEASE = 60.0  # Flower: two heartbeats of 30 s


class Machine:
    """A machine whose wall clock can be set."""

    def __init__(self) -> None:
        self.elapsed, self.offset = 0.0, 0.0
        self.clock = SteadyClock(lambda: START + timedelta(seconds=self.elapsed + self.offset), lambda: self.elapsed)

    def after(self, seconds: float) -> float:
        """Return this clock's seconds since the start after so many more."""
        self.elapsed += seconds
        return (self.clock.now() - START).total_seconds()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(steady_clock, "log", lambda level, text, *values: lines.append(text % values))
    return lines


def test_without_a_step_it_is_the_machines_by_hand(said):
    machine = Machine()
    assert machine.after(30.0) == 30.0
    machine.offset = 1.5  # corrected by a time server
    assert machine.after(30.0) == 61.5
    machine.offset = 0.0
    assert machine.after(30.0) == 90.0
    assert said == []


def test_a_step_of_two_hours_for_forty_seconds_ends_no_lease_and_is_said_once(said):
    machine, step = Machine(), 7200.0
    before = machine.after(100.0)
    machine.offset = step
    times = [machine.after(1.0) for _ in range(40)]
    machine.offset = 0.0
    back = machine.after(1.0)
    ends = [abs(after - before - seconds) for seconds, after in enumerate(times, 1)]
    assert max(ends) <= 0.25 * 40
    assert times == sorted(times)
    assert abs(back - 141.0) <= 0.25 * 41
    assert said[0].startswith(f"the machine's clock jumped by {step:+.0f} s to ")
    assert len(said) <= 2  # the step there and the one back


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(-1e5, 1e5)), max_size=30))
def test_no_step_moves_a_lease_by_more_than_half_a_beat(steps):
    """Between two heartbeats 30 s apart the clock goes on by at most 30 * 1.25 + 2 s, below the lease of 60 s."""
    machine = Machine()
    last = 0.0
    for seconds, offset in steps:
        machine.offset = offset
        now = machine.after(seconds)
        assert now - last <= seconds * 1.25 + 2.0 + 1e-6 < LEASE
        last = now


def test_a_step_that_stays_is_followed(said):
    machine = Machine()
    machine.offset = 100.0
    times = [machine.after(10.0) for _ in range(60)]
    assert times[0] == 12.5
    assert times[-1] == 700.0
    assert len(said) == 1


def test_a_step_back_is_followed_at_once_so_that_no_message_is_older_than_it_is(said):
    """A message's life is counted from the sender's clock, which is the machine's."""
    machine = Machine()
    machine.after(100.0)
    machine.offset = -7200.0
    assert machine.after(10.0) == 110.0 - 7200.0
    assert machine.after(10.0) == 120.0 - 7200.0
    assert len(said) == 1
    machine.offset = 0.0  # and forward again, slowly
    assert machine.after(10.0) == 130.0 - 7200.0 + 2.5
