"""Detect a SuperNode's dead connection within seconds, but keep a connection that is merely slow.

Flower's SuperNode polls without a deadline. If a firewall, router or bridge silently drops the connection,
the request waits for a TCP timeout, which takes 15 minutes on Linux. A proxy that keeps its own
end open makes it wait forever. The server considers the site offline after a minute.

The remedy is a ping. But its answer waits behind everything that the connection still has to carry: at 50 kB/s, an
app's bundle of 3 MB takes a minute. With one limit for everything, a slow line would be taken for a dead one, and the
transfer would start over forever. So a SuperNode has two connections:

| connection | carries | limit on a ping | a network that stops carrying data is detected after |
|---|---|---|---|
| control | everything else: polls, heartbeats, announcements | `TIMEOUT` | `SECONDS` without a byte, then `TIMEOUT` |
| data | `DATA_CALLS`: a bundle, parts of messages | `DATA_TIMEOUT` | `SECONDS`, then `DATA_TIMEOUT` |

Afterwards, it tries to connect at most once every `AGAIN` seconds. Heartbeats never wait behind a part.

gRPC would also send pings of its own to measure the line, and then allow ever more bytes to be in transit. Where
routers queue, it measures the queue. Instead, each end sets how many bytes of a call may be in transit: `WINDOW_BYTES`.

Between rounds, the data connection carries nothing, and a firewall may forget it. So it is closed after `IDLE_SECONDS`,
and the next part opens a new one.

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
DATA_TIMEOUT = 300.0  # two parts at once, with both windows full, at 5 kB/s: 210 s
IDLE_SECONDS = 60.0  # firewalls keep a silent connection for four minutes or more
DATA_CALLS = ("GetFab", "PullObject", "PushObject")
WINDOW_BYTES = 512 * 1024  # 40 Mbit/s for each call over 100 ms
WINDOW_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))


def patch_supernode_keepalive(
    seconds: float = SECONDS, timeout: float = TIMEOUT, data_timeout: float = DATA_TIMEOUT
) -> None:
    """Split every gRPC channel in this process into a control and a data connection that detect a dead peer."""
    every = (
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(AGAIN * 1000)),
        *WINDOW_OPTIONS,
    )
    control, data = ((*every, *ping_options(limit)) for limit in (timeout, data_timeout))
    data = (*data, ("grpc.client_idle_timeout_ms", round(1000 * IDLE_SECONDS)))
    for name in ("secure_channel", "insecure_channel"):
        setattr(grpc, name, _with(getattr(grpc, name), control, data))


def ping_options(seconds: float) -> tuple[tuple[str, int], ...]:
    """Return gRPC's options that limit how long bytes may go unacknowledged and a ping unanswered."""
    # The first also sets TCP's user timeout, which a closed window exceeds; without the second, it is a minute.
    return tuple((f"grpc.{name}_timeout_ms", round(seconds * 1000)) for name in ("keepalive", "http2.ping"))


class SplitChannel(grpc.Channel):
    """Two connections to one server, which look like one channel."""

    def __init__(self, control: grpc.Channel, data: grpc.Channel) -> None:
        self._control, self._data = control, data

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Report the state of the control connection."""
        self._control.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """Stop reporting."""
        self._control.unsubscribe(callback)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable of the connection that carries this method."""
        return self._of(method).unary_unary(method, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable of the connection that carries this method."""
        return self._of(method).unary_stream(method, *args, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable of the connection that carries this method."""
        return self._of(method).stream_unary(method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a callable of the connection that carries this method."""
        return self._of(method).stream_stream(method, *args, **kwargs)

    def close(self) -> None:
        """Close both connections."""
        self._control.close()
        self._data.close()

    def __enter__(self) -> SplitChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, method: str) -> grpc.Channel:
        return self._data if method.rpartition("/")[2] in DATA_CALLS else self._control


def _with(
    make: Callable[..., grpc.Channel], control: tuple[tuple[str, int], ...], data: tuple[tuple[str, int], ...]
) -> Callable[..., grpc.Channel]:
    """Wrap `make` to make two connections, with these channel options before the caller's options."""

    def made(*args: Any, options: Any = None, **kwargs: Any) -> grpc.Channel:
        return SplitChannel(*(make(*args, options=[*more, *(options or ())], **kwargs) for more in (control, data)))

    return made
