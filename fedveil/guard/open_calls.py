"""Limit how many calls with one key may be open at once, and how long a call may withhold its body.

A server that waits for a body uses a thread or memory for it. A thousand calls that never sent a body locked all
other callers out of Flower's gRPC port.

| a key | result |
|---|---|
| has at most 8 open calls | each is served |
| opens a ninth | its oldest call is ended |
| has not sent a body after 15 minutes | that call ends |

When a site's connection drops, its calls stay open until keepalive detects them. A limit that refused the new call
would lock that site out.

Calls are counted after the signature check: a public key is not secret, and a caller that names a key without signing
must not use up that key's calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedveil.guard import fleet_limits as limits


@dataclass(eq=False)
class OpenCall:
    """An admitted call. `end` tells its site to retry; any thread can call it at any time."""

    key: bytes
    end: Callable[[], object]
    begun: float
    has_body: bool = False


class OpenCalls:
    """The open calls of all keys."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._of_key: dict[bytes, list[OpenCall]] = {}
        self._lock = threading.Lock()

    def enter(self, key: bytes, end: Callable[[], object]) -> OpenCall:
        """Add a call, and end its key's oldest call if there are too many."""
        call = OpenCall(key, end, self._monotonic())
        with self._lock:
            own = self._of_key.setdefault(key, [])
            own.append(call)
            excess = own[: max(0, len(own) - limits.MAX_OPEN_CALLS)]
            del own[: len(excess)]
        for oldest in excess:
            oldest.end()
        return call

    def leave(self, call: OpenCall) -> None:
        """Remove a call; a call that was ended by another one is already gone."""
        with self._lock:
            own = self._of_key.get(call.key, [])
            if call in own:
                own.remove(call)
            if not own:
                self._of_key.pop(call.key, None)

    def end_late(self) -> None:
        """End the calls that have not sent their body in time."""
        with self._lock:
            since = self._monotonic() - limits.MAX_BODY_SECONDS
            late = [call for own in self._of_key.values() for call in own if not call.has_body and call.begun <= since]
        for call in late:
            self.leave(call)
            call.end()

    def count(self) -> int:
        """Return the number of open calls."""
        with self._lock:
            return sum(map(len, self._of_key.values()))
