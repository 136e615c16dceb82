"""Ended processes are started again, later each time, and not for ever."""

from __future__ import annotations

import pytest

from fedveil.console.launch.restarts import Restarts, own_error
from fedveil.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_waits_longer_each_time_and_from_a_second_on_once_it_ran_for_a_minute() -> None:
    restarts = Restarts(Clock())
    assert [restarts.delay(f"kind {n}", "why", 2.0) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [restarts.delay("other", "why", ran) for ran in (61.0, 2.0)] == [1, 2]


def test_the_same_end_ten_times_in_ten_minutes_is_the_last_and_has_its_reason() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    for _ in range(9):
        restarts.delay("superlink 1", "no space left", 1.0)
        restarts.delay("superlink 9", "killed", 1.0)
        clock.now += 60
    with pytest.raises(ConfigError, match=r"no space left: 10 times within 10 minutes, .*fix that first"):
        restarts.delay("superlink 1", "no space left", 1.0)
    clock.now += 700
    assert restarts.delay("superlink 1", "no space left", 1.0) == 60


def test_what_an_app_prints_is_no_reason_of_ours() -> None:
    assert own_error("INFO up\nerror: members.json is broken\nParent gone\n", 2) == "members.json is broken"
    assert own_error("INFO up\nerror: flwr: expected version 1.39\n", 1) == "flwr: expected version 1.39"
    assert own_error("error: an app of mine\nTraceback\nValueError: locked\n", 1) == ""
    assert own_error("error: an app of mine\n", -9) == ""
