"""Limit how often a site may call: one token bucket per site and call, refilled evenly over a minute.

| a site | result |
|---|---|
| calls less often than its rate | admitted, even if it makes all calls of a minute at once |
| calls more often | rejected until tokens are available again; that site's other calls are unaffected |
| calls after a server restart | its buckets are full again |
| needs more tokens at once than a minute provides | never admitted |

Only registered sites reach this code, so their number bounds the number of buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping

_MINUTE = 60.0


class CallRates:
    """Token buckets for the calls in `per_minute`, which maps call names to tokens per minute."""

    def __init__(self, per_minute: Mapping[str, float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._monotonic = per_minute, monotonic
        self._buckets: dict[tuple[Hashable, str], tuple[float, float]] = {}
        self._lock = threading.Lock()

    def admits(self, site: Hashable, call: str, tokens: float = 1.0) -> bool:
        """Take tokens for a site's call and return True if there are enough; otherwise, return False."""
        most = float(self._per_minute[call])
        with self._lock:
            now = self._monotonic()
            left, at = self._buckets.get((site, call), (most, now))
            left = min(most, left + (now - at) * most / _MINUTE)
            admitted = tokens <= left
            self._buckets[site, call] = (left - tokens if admitted else left), now
            return admitted
