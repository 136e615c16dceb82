"""The attacks that an audit starts within a time limit, and their order."""

from __future__ import annotations

import math

import pytest

from fedveil.attacks.audit.schedule import AuditStep, TimeBudget, describe_skipped, take_steps
from fedveil.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now, self.done = 100.0, []

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, on: str, cost: int, seconds: float) -> AuditStep:
        def take() -> None:
            self.now += seconds
            self.done.append((name, on))

        return AuditStep(name, on, cost, take)


def test_the_cheapest_come_first_and_equal_ones_in_their_order():
    clock = Clock()
    steps = [clock.step("dear", "a", 9, 1), clock.step("cheap", "b", 1, 1), clock.step("cheap", "a", 1, 1)]
    assert take_steps(steps, TimeBudget(clock=clock)) == []
    assert clock.done == [("cheap", "b"), ("cheap", "a"), ("dear", "a")]


def test_each_step_that_begins_is_counted_and_one_that_does_not_is_not():
    clock, begun = Clock(), []
    steps = [clock.step("x", "a", 2, 9.0), clock.step("y", "a", 1, 3.0), clock.step("z", "a", 3, 1.0)]
    take_steps(steps, TimeBudget(5.0, clock), lambda number, count: begun.append((number, count)))
    assert begun == [(1, 3), (2, 3)]


def test_no_step_begins_when_time_is_over():
    clock = Clock()
    budget = TimeBudget(5.0, clock)
    left = take_steps([clock.step("x", str(i), 1, 3.0) for i in range(4)], budget)
    assert clock.done == [("x", "0")], "a second step of 3 s does not fit into the 2 s that are left"
    assert [step.on for step in left] == ["1", "2", "3"]
    assert budget.left == 2.0


def test_another_attack_may_begin_in_what_is_left_and_overrun_by_itself_alone():
    clock = Clock()
    left = take_steps(
        [clock.step("x", "a", 1, 3.0), clock.step("x", "b", 1, 3.0), clock.step("y", "a", 2, 9.0)],
        TimeBudget(5.0, clock),
    )
    assert clock.done == [("x", "a"), ("y", "a")]
    assert [step.on for step in left] == ["b"]


def test_an_attack_without_its_controls_is_not_tried():
    """Its second control does not fit, so nothing that may take as long does."""
    clock = Clock()
    steps = [
        clock.step("x", "overfitted", 1, 4.0),
        clock.step("x", "other rows", 1, 4.0),
        clock.step("x", "server", 1, 0.0),
        clock.step("y", "server", 1, 0.0),
    ]
    left = take_steps(steps, TimeBudget(7.0, clock))
    assert clock.done == [("x", "overfitted"), ("y", "server")]
    assert describe_skipped(left) == [
        "Left out: x on other rows, server: there was not enough time; raise --minutes, or leave it out."
    ]


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_what_is_no_time_is_refused(minutes):
    with pytest.raises(ConfigError, match="--minutes: expected more than 0 and at most 43200, found"):
        TimeBudget.of_minutes(minutes)


def test_minutes_are_sixty_seconds_and_none_is_no_bound():
    assert TimeBudget.of_minutes(None).left == math.inf
    assert 115 < TimeBudget.of_minutes(2.0).left <= 120
