"""The steps of an audit, cheapest first, within a time budget.

| case | result |
|---|---|
| no budget | every step runs |
| time is up | no further step begins; the current step still finishes, so an audit may run over by one step |
| the attack's longest step so far took longer than the time left | the step is skipped; cheaper steps may still run |
| a control | runs before the other steps of its attack: if the control does not fit, neither do those steps |
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
    """One attack, or several attacks in one pass, on one model or on one site's uploads.

    Attributes:
        attacks: names of the attacks.
        on: description of the target.
        cost: the value of `AuditAttack.cost`.
        take: runs the step.
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
        if not 0 < minutes <= _MOST_MINUTES:  # False for NaN
            raise ConfigError(f"--minutes: expected more than 0 and at most {_MOST_MINUTES:g}, found {minutes:g}")
        return cls(60 * minutes)

    @property
    def left(self) -> float:
        """Return the seconds left."""
        return self._began[0] + self.seconds - self.clock()


def take_steps(
    steps: Sequence[AuditStep],
    budget: TimeBudget,
    begin: Callable[[int, int], None] = lambda number, count: None,
) -> list[AuditStep]:
    """Run the steps in order of cost, cheapest first (stable); return the steps that did not fit.

    `begin` is called before each step that runs, with its number, counted from 1, and the number of all steps.
    """
    longest: dict[str, float] = {}
    left = []
    for number, step in enumerate(sorted(steps, key=lambda step: step.cost), 1):
        if budget.left <= longest.get(step.attacks, 0.0):
            left.append(step)
        else:
            before = budget.clock()
            begin(number, len(steps))
            step.take()
            longest[step.attacks] = max(longest.get(step.attacks, 0.0), budget.clock() - before)
    return left


def describe_skipped(left: Sequence[AuditStep]) -> list[str]:
    """Return a sentence for each attack that was skipped for lack of time."""
    targets_by_attack: dict[str, list[str]] = {}
    for step in left:
        targets_by_attack.setdefault(step.attacks, []).append(step.on)
    return [
        f"Left out: {attacks} on {', '.join(dict.fromkeys(on))}: there was not enough time; raise --minutes, or "
        "leave it out."
        for attacks, on in targets_by_attack.items()
    ]
