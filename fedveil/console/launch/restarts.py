"""Decide when to restart a process that has ended, and when to give up and report the reason.

It is restarted after 1, 2, 4, ... 60 s, starting over at 1 s once it has run for a minute. If it ends for the same
reason ten times within ten minutes, the command exits with that reason.
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
# Exit code of fedveil/guard programs when a restart would not help: a bad registry, log, port or Flower release.
_OWN_ERROR, _REFUSED = "error: ", 2


@dataclass
class Restarts:
    """The exits so far of a process and its replacements."""

    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _ends: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=1000))

    def delay(self, kind: str, reason: str, ran: float) -> float:
        """Return the seconds to wait before restarting a process that ended after `ran` seconds.

        Args:
            kind: identifies the cause, as the wording of `reason` may vary.
            reason: the message for users.

        Raises:
            ConfigError: the process ended for this cause too often; the message gives the reason.
        """
        now = self.clock()
        self._failures = 1 if ran >= _WELL_SECONDS else self._failures + 1
        self._ends.append((now, kind))
        same = sum(kind == other and now - at <= WITHIN_SECONDS for at, other in self._ends)
        if same >= SAME_REASON:
            raise ConfigError(
                f"{reason[:_SHOWN]}: {same} times within {WITHIN_SECONDS / 60:g} minutes, so it is not restarted; fix "
                "that first"
            )
        return float(min(2.0 ** min(self._failures - 1, 10), LONGEST_SECONDS))


def own_error(log: str, code: int) -> str:
    """Return the reason that a FedVeil program printed when it ended with this exit code, or "".

    Apps write to the same log, so with exit code 1 only the very last line counts.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines if code == _REFUSED else lines[-1:] if code == 1 else []
    found = [line for line in last if line.startswith(_OWN_ERROR)]
    return found[-1].removeprefix(_OWN_ERROR) if found else ""
