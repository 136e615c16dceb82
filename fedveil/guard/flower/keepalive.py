"""Detect a SuperNode's dead connection within seconds, and reconnect.

Flower's SuperNode polls without a deadline. If a firewall, router or bridge silently drops the connection,
the request waits for a TCP timeout, which takes 15 minutes on Linux. A proxy that keeps its own
end open makes it wait forever. The server considers the site offline after a minute.

| the network | detected after |
|---|---|
| silently stops carrying data | `SECONDS` without a byte, then `TIMEOUT` without an answer to a ping |
| comes back with a different address or behind a different router | the same; then a new connection |
| stays down for longer | one connection attempt every `AGAIN` seconds at most |

Pings are sent only during an open request, and at most two without data between them. A gRPC server treats
more pings as abuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

SECONDS = 15.0
TIMEOUT = 10.0
AGAIN = 10.0


def patch_supernode_keepalive(seconds: float = SECONDS, timeout: float = TIMEOUT) -> None:
    """Make every gRPC channel in this process send keepalive pings to check that its peer is alive."""
    options = (
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(timeout * 1000)),  # for unacknowledged bytes
        ("grpc.http2.ping_timeout_ms", round(timeout * 1000)),  # for the ping: gRPC 1.85 otherwise waits a minute
        ("grpc.max_reconnect_backoff_ms", round(AGAIN * 1000)),
    )
    for name in ("secure_channel", "insecure_channel"):
        setattr(grpc, name, _with(getattr(grpc, name), options))


def _with(make: Callable[..., grpc.Channel], more: tuple[tuple[str, int], ...]) -> Callable[..., grpc.Channel]:
    """Wrap `make` to put these channel options before the caller's options."""

    def made(*args: Any, options: Any = None, **kwargs: Any) -> grpc.Channel:
        return make(*args, options=[*more, *(options or ())], **kwargs)

    return made
