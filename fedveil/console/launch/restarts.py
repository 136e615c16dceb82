"""When a process that has ended is started again, and when its people are told instead.

It is started again after 1, 2, 4 .. 60 s, from 1 s on again once it ran for a minute. The same end ten times in ten
minutes is no accident: then the command ends, with the reason.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fedveil.errors import ConfigError

LONGEST_SECONDS = 60.0
SAME_REASON = 10
WITHIN_SECONDS = 600.0
_WELL_SECONDS = 60.0
_SHOWN = 500
# As the programs of fedveil/guard end where no new start would help: a registry, a log, a port or a Flower.
_OWN_ERROR, _REFUSED = "error: ", 2


@dataclass
class Restarts:
    """The ends of one process, or of one that takes its place, so far."""

    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _ends: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=1000))

    def delay(self, kind: str, reason: str, ran: float) -> float:
        """Return the seconds until it is started again, after an end once it ran for `ran` seconds.

        Args:
            kind: what makes two ends the same: its words may differ each time.
            reason: for its people.

        Raises:
            ConfigError: it ended so too often; the text has the reason.
        """
        now = self.clock()
        self._failures = 1 if ran >= _WELL_SECONDS else self._failures + 1
        self._ends.append((now, kind))
        same = sum(kind == other and now - at <= WITHIN_SECONDS for at, other in self._ends)
        if same >= SAME_REASON:
            raise ConfigError(
                f"{reason[:_SHOWN]}: {same} times within {WITHIN_SECONDS / 60:g} minutes; it is not restarted, fix "
                "that first"
            )
        return float(min(2.0 ** min(self._failures - 1, 10), LONGEST_SECONDS))


def own_error(log: str, code: int) -> str:
    """Return what a program of FedVeil's own said as it ended with this exit code, "" where it did not say why.

    Apps write to the same log: what they print there is no reason, unless it is the very end and that program's.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines if code == _REFUSED else lines[-1:] if code == 1 else []
    found = [line for line in last if line.startswith(_OWN_ERROR)]
    return found[-1].removeprefix(_OWN_ERROR) if found else ""
