"""The steps of an audit, in the order of what they cost, within a budget of time.

| case | what is done |
|---|---|
| no budget | every step |
| time is over | no other step begins; the one under way ends, so an audit may take longer by one step |
| the longest step of the same attack so far took longer than what is left | not begun; cheaper ones are |
| a control | a step like another, before those of its attack: where it does not fit, they do not either |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.errors import ConfigError

_MOST_MINUTES = 60 * 24 * 30.0


@dataclass(frozen=True)
class AuditStep:
    """One attack, or several that share a pass, on one model or on what one site sent.

    Attributes:
        attacks: their names.
        on: what is attacked, in words.
        cost: of `AuditAttack.cost`.
        take: does it.
    """

    attacks: str
    on: str
    cost: int
    take: Callable[[], object]


@dataclass(frozen=True)
class TimeBudget:
    """Time limit of an audit.

    Attributes:
        seconds: limit in seconds from creation; infinite means no limit.
        clock: function that returns seconds.
    """

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    _began: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began.append(self.clock())

    @classmethod
    def of_minutes(cls, minutes: float | None) -> TimeBudget:
        """Create the budget from the option --minutes. Raises ConfigError for an invalid duration."""
        if minutes is None:
            return cls()
        if not 0 < minutes <= _MOST_MINUTES:  # false for a NaN
            raise ConfigError(f"--minutes: expected more than 0 and at most {_MOST_MINUTES:g}, found {minutes:g}")
        return cls(60 * minutes)

    @property
    def left(self) -> float:
        """Seconds."""
        return self._began[0] + self.seconds - self.clock()


def take_steps(steps: Sequence[AuditStep], budget: TimeBudget) -> list[AuditStep]:
    """Takes the steps, the cheapest first and those of equal cost in their order; returns those that did not fit."""
    longest: dict[str, float] = {}
    left = []
    for step in sorted(steps, key=lambda step: step.cost):
        if budget.left <= longest.get(step.attacks, 0.0):
            left.append(step)
        else:
            before = budget.clock()
            step.take()
            longest[step.attacks] = max(longest.get(step.attacks, 0.0), budget.clock() - before)
    return left


def describe_skipped(left: Sequence[AuditStep]) -> list[str]:
    """A sentence for each attack that the time was too short for."""
    targets_by_attack: dict[str, list[str]] = {}
    for step in left:
        targets_by_attack.setdefault(step.attacks, []).append(step.on)
    return [
        f"Left out: {attacks} on {', '.join(dict.fromkeys(on))}: there was not enough time; raise --minutes, or "
        "leave it out."
        for attacks, on in targets_by_attack.items()
    ]
