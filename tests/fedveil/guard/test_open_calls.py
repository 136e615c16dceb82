"""Calls of a key that are open at once, by a clock that the test moves."""

from __future__ import annotations

from fedveil.guard import fleet_limits as limits
from fedveil.guard.open_calls import OpenCalls

NORTH, SOUTH = b"north", b"south"


def test_eight_calls_are_open_and_a_ninth_ends_the_oldest() -> None:
    calls, ended = OpenCalls(), list[int]()
    own = [calls.enter(NORTH, lambda number=number: ended.append(number)) for number in range(limits.MAX_OPEN_CALLS)]
    calls.enter(SOUTH, lambda: ended.append(99))
    assert ended == []
    calls.enter(NORTH, lambda: None)
    assert ended == [0]
    calls.leave(own[0])  # its own end comes later
    calls.leave(own[1])
    calls.enter(NORTH, lambda: None)
    assert ended == [0]
    assert calls.count() == limits.MAX_OPEN_CALLS + 1


def test_calls_that_have_ended_leave_nothing() -> None:
    calls = OpenCalls()
    for _ in range(20):
        call = calls.enter(NORTH, lambda: None)
        calls.leave(call)
        calls.leave(call)
    assert calls.count() == 0
    assert calls._of_key == {}


def test_a_body_has_five_minutes() -> None:
    clock, ended = [0.0], list[str]()
    calls = OpenCalls(monotonic=lambda: clock[0])
    calls.enter(NORTH, lambda: ended.append("late"))
    served = calls.enter(NORTH, lambda: ended.append("served"))
    served.has_body = True
    clock[0] = limits.MAX_BODY_SECONDS - 1
    calls.enter(SOUTH, lambda: ended.append("new"))
    calls.end_late()
    assert ended == []
    clock[0] = limits.MAX_BODY_SECONDS
    calls.end_late()
    calls.end_late()
    assert ended == ["late"]
    assert calls.count() == 2
