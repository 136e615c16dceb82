"""How long SuperNode and SuperExec wait before they look again: little at first, more the longer they have waited.

Flower sleeps for a fixed time and looks again. Most of a short round, and of an exchange of keys or shares, is that
sleep; and a part of what a site costs that waits for a run is the looking.

| who waits | for what | Flower's own sleep | here, with a first sleep of 0.2 s |
|---|---|---|---|
| SuperNode | a message of the SuperLink | 3 s | 0.2 s, later a tenth of the time waited, at most 10 s |
| SuperNode | the reply of its ClientApp | 0.5 s | 0.05 s, later a tenth, at most 0.5 s |
| SuperExec | a task of its SuperNode | 1 s | 0.1 s, later a tenth, at most 5 s |

So the two add a fifth at most to what was waited anyway, and 15 s to the start of a run that a site has waited for.
FEDVEIL_POLL_SECONDS sets the first sleep; 3 leaves Flower's own, and more is slept as it is. N sites ask a server at
most N / first times a second, so it grows with them (`for_sites`): kits have it, and `fedveil site start
--poll-seconds` takes it.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping

VARIABLE = "FEDVEIL_POLL_SECONDS"
DEFAULT = 0.2
LEAST = 0.02
_A_SECOND = 200  # questions that a server shall have from all sites together
_GROWTH = 0.1


class Pace:
    """Takes the place of the module `time` in a module of Flower that only sleeps.

    Attributes:
        first: by the seconds of Flower's own sleep, those of the first one here.
        longest: likewise those of the longest, where that is not Flower's own.
    """

    def __init__(
        self,
        first: Mapping[float, float],
        longest: Mapping[float, float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.first, self.longest = dict(first), dict(longest or {})
        self._sleep = sleep
        self._what, self._waited = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        """Flower's sleep of so many seconds: shorter, if the same is not slept for long yet; longer, if it is for very
        long; as long as the first, where that is no shorter than Flower's."""
        if seconds != self._what:
            self.again()
            self._what = seconds
        first = self.first.get(seconds, seconds)
        longest = first if first >= seconds else self.longest.get(seconds, seconds)
        chosen = min(max(first, _GROWTH * self._waited), longest)
        self._waited += chosen
        self._sleep(chosen)

    def again(self) -> None:
        """What was waited for has come."""
        self._waited = 0.0


def for_sites(count: int) -> float:
    """The first sleep with which so many sites ask a server 200 times a second together, or less often."""
    return max(DEFAULT, count / _A_SECOND)


def first_seconds() -> float:
    """What FEDVEIL_POLL_SECONDS says. Ends the process with exit code 2 where that is no number from 0.02 on."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST <= seconds < math.inf:
        print(f"error: {VARIABLE}: expected seconds, {LEAST} or more, found {text[:40]!r}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    return seconds


def of_supernode() -> None:
    """From now on a SuperNode in this process waits so."""
    first = first_seconds()
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module.time = Pace({3: first, 0.5: min(first / 4, 0.5)}, {3: 10.0})  # type: ignore[attr-defined]


def of_superexec() -> Pace:
    """From now on a SuperExec in this process waits so; who launches a task calls `again`."""
    first = first_seconds()
    module = importlib.import_module("flwr.supercore.superexec.run_superexec")
    pace = Pace({1.0: min(first / 2, 1.0)}, {1.0: 5.0})
    module.time = pace  # type: ignore[attr-defined]
    return pace
