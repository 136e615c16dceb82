"""Polling intervals of SuperNode and SuperExec: short at first, and longer the more time they have waited.

Flower sleeps for a fixed time between polls. This sleep dominates a short round and an exchange of keys or
shares. Polling also adds to the cost of a site that is waiting for a run.

| process | waits for | Flower's sleep | here, with a first sleep of 0.2 s |
|---|---|---|---|
| SuperNode | a message from the SuperLink | 3 s | 0.2 s, later a tenth of the time waited, at most 10 s |
| SuperNode | its ClientApp's reply | 0.5 s | 0.05 s, later a tenth, at most 0.5 s |
| SuperExec | a task from its SuperNode | 1 s | 0.1 s, later a tenth, at most 5 s |

In total, sleeps add at most a fifth to the waiting time, and at most 15 s to the start of a run after a long wait.
FEDVEIL_POLL_SECONDS sets the first sleep; 3 restores Flower's own, and larger values are used unchanged.
N sites poll a server at most N / first times per second, so the first sleep grows with N
(`patch_site_polling`). Kits contain this value, and `fedveil site start --poll-seconds` sets it.
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
    """Replaces `time` in a Flower module that uses it only to sleep.

    Attributes:
        first: the first sleep in seconds, keyed by Flower's own sleep in seconds.
        longest: the longest sleep, with the same keys, where it differs from Flower's.
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
        """Sleep instead of Flower, which would sleep for `seconds`.

        The sleep is shorter at first and grows with the time waited. If the first sleep is not shorter than Flower's,
        it stays constant.
        """
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
    """Return the first sleep at which this many sites poll a server at most 200 times per second in total."""
    return max(DEFAULT, count / _A_SECOND)


def first_seconds() -> float:
    """Read FEDVEIL_POLL_SECONDS. Exits with code 2 if it is not a number of at least 0.02."""
    text = os.environ.get(VARIABLE, str(DEFAULT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST <= seconds < math.inf:
        print(f"error: {VARIABLE}: must be {LEAST} seconds or more, found {text[:40]!r}", file=sys.stderr)  # noqa: T201
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
