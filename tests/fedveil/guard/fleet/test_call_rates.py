"""Rates of calls, by a clock that the test moves."""

from __future__ import annotations

import threading

from fedveil.guard.fleet.call_rates import CallRates


def rates(clock: list[float]) -> CallRates:
    return CallRates({"pull": 6, "bytes": 600}, monotonic=lambda: clock[0])


def test_a_minute_s_calls_may_come_at_once_and_come_back_evenly() -> None:
    clock = [0.0]
    own = rates(clock)
    assert [own.admits(1, "pull") for _ in range(7)] == [True] * 6 + [False]
    clock[0] = 9.0
    assert not own.admits(1, "pull")
    clock[0] = 10.0
    assert [own.admits(1, "pull") for _ in range(2)] == [True, False]
    clock[0] = 1000.0
    assert [own.admits(1, "pull") for _ in range(7)] == [True] * 6 + [False]


def test_sites_and_calls_have_buckets_of_their_own() -> None:
    own = rates([0.0])
    for _ in range(6):
        own.admits(1, "pull")
    assert not own.admits(1, "pull")
    assert own.admits(2, "pull")
    assert own.admits(1, "bytes", 600)
    assert not own.admits(1, "bytes", 1)


def test_more_than_a_minute_s_tokens_are_never_admitted_and_cost_none() -> None:
    own = rates([0.0])
    assert not own.admits(1, "bytes", 601)
    assert own.admits(1, "bytes", 600)


def test_threads_get_no_more_together() -> None:
    own, taken = rates([0.0]), list[bool]()
    threads = [
        threading.Thread(target=lambda: taken.extend(own.admits(1, "pull") for _ in range(50))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(taken) == 6
