"""Polling intervals of SuperNode and SuperExec: short at first, longer the more they have waited.

Flower sleeps for a fixed time between polls. This sleep takes most of a short round, and of an exchange of
keys or shares. Polling is also part of the cost of a site that waits for a run.

| who waits | for what | Flower's own sleep | here, with a first sleep of 0.2 s |
|---|---|---|---|
| SuperNode | a message of the SuperLink | 3 s | 0.2 s, later a tenth of the time waited, at most 10 s |
| SuperNode | the reply of its ClientApp | 0.5 s | 0.05 s, later a tenth, at most 0.5 s |
| SuperExec | a task of its SuperNode | 1 s | 0.1 s, later a tenth, at most 5 s |

So the two add at most a fifth to the waiting time, and 15 s to the start of a run that a site has waited
for. FEDVEIL_POLL_SECONDS sets the first sleep; 3 keeps Flower's own, and larger values are used as they
are. N sites poll a server at most N / first times a second, so the first sleep grows with N
(`patch_site_polling`). Kits contain it, and `fedveil site start --poll-seconds` sets it.
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
_A_SECOND = 200  # maximum polls per second from all sites together
_GROWTH = 0.1


class PollBackoff:
    """Replaces the module `time` in a Flower module that only sleeps.

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
        """Reset the backoff after the awaited event has arrived."""
        self._waited = 0.0


def patch_site_polling(count: int) -> float:
    """The first sleep with which so many sites ask a server 200 times a second together, or less often."""
    return max(DEFAULT, count / _A_SECOND)


def first_seconds() -> float:
    """Read FEDVEIL_POLL_SECONDS. Exits with code 2 if it is not a number of at least 0.02."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST <= seconds < math.inf:
        print(f"error: {VARIABLE}: expected {LEAST} seconds or more, found {text[:40]!r}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    return seconds


def patch_supernode_polling() -> None:
    """Make a SuperNode in this process poll with backoff."""
    first = first_seconds()
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module.time = PollBackoff({3: first, 0.5: min(first / 4, 0.5)}, {3: 10.0})  # type: ignore[attr-defined]


def patch_superexec_polling() -> PollBackoff:
    """Make a SuperExec in this process poll with backoff; call `again` when launching a task."""
    first = first_seconds()
    module = importlib.import_module("flwr.supercore.superexec.run_superexec")
    pace = PollBackoff({1.0: min(first / 2, 1.0)}, {1.0: 5.0})
    module.time = pace  # type: ignore[attr-defined]
    return pace
