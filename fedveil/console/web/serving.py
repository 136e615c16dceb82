"""Serve a dashboard on this machine's loopback interface until Ctrl-C; auth.py controls access.

| a client ... | result |
|---|---|
| that sends no complete request, or stops sending | is disconnected within 10 to 20 seconds, to free its slot |
| that reads slowly | gets its response without delaying other clients |
| that sends more than 16 kB of headers | gets a 400 |
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedveil.console.web.auth import METRICS_PATH, AccessMiddleware, DashboardCredentials
from fedveil.console.web.metrics import require_exporter
from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize
from fedveil.server_app.metrics.sinks.prometheus import read_token_file

HOST = "127.0.0.1"
_IDLE_SECONDS = 10.0
_LONGEST_HEAD = 16_384


def require_loopback(host: str) -> None:
    """Raise ConfigError, with the reason, for an address other than this machine's loopback."""
    if host not in (HOST, "localhost"):
        raise ConfigError(
            f"--host: expected {HOST}, found {sanitize(host, 80)}: pages and the link's token are sent unencrypted, so "
            "others on the network could read what sites sent and refused; from another machine: "
            f"ssh -N -L PORT:{HOST}:PORT THIS-MACHINE"
        )


def open_listener(port: int) -> socket.socket:
    """Return a loopback-only socket; 0 means any free port. Raises ConfigError if the port is unavailable."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # so that the link works immediately
    except (OSError, OverflowError) as error:
        listener.close()
        used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "it is in use" if used else f"it cannot be used ({error})"
        raise ConfigError(f"--port: expected a free port, found {port}: {reason}; name another, or 0 for any") from None
    return listener


class _Bounded(H11Protocol):
    """A connection that is checked every ten seconds and closed if no response is in progress."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_IDLE_SECONDS, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
            return
        self.loop.call_later(_IDLE_SECONDS, self._look)


class _Announced(uvicorn.Server):
    """Announces that it is serving only once signals end it cleanly; an earlier signal would interrupt its start."""

    announce: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()


class DashboardServer:
    """A listening dashboard, served by `run`. `app_of` builds its pages from its credentials and an end check.

    `scrape_token`: the bearer token for /metrics; "" = no metrics.
    """

    def __init__(
        self,
        port: int,
        app_of: Callable[[DashboardCredentials, Callable[[], bool]], ASGIApp],
        scrape_token: str = "",
    ) -> None:
        self._socket = open_listener(port)
        self.entry = DashboardCredentials(self._socket.getsockname()[1], scrape_token=scrape_token)
        app = AccessMiddleware(app_of(self.entry, lambda: self._server.should_exit), self.entry)
        config = uvicorn.Config(
            cast(Any, app), http=_Bounded, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, date_header=False, proxy_headers=False, h11_max_incomplete_event_size=_LONGEST_HEAD,
            timeout_graceful_shutdown=3, log_level="error",
        )  # fmt: skip
        self._server = _Announced(config)

    def run(self, announce: Callable[[], None] = lambda: None) -> None:
        """Serve until `end`, SIGINT or SIGTERM; call `announce` once signal handlers are in place."""
        self._server.announce = announce
        self._server.run(sockets=[self._socket])

    def end(self) -> None:
        """End `run` from another thread."""
        self._server.should_exit = True


def serve_dashboard(
    host: str,
    port: int,
    app_of: Callable[[DashboardCredentials, Callable[[], bool]], ASGIApp],
    metrics_token: Path | None = None,
) -> int:
    """Print the link and serve until Ctrl-C. With metrics, the link is printed only in a terminal.

    `metrics_token`: the file with the token that opens /metrics, which is created if there is none.

    Raises:
        ConfigError: the address or port is unusable, or the package that writes metrics is missing.
        StateError: others can read the token, or it is malformed.
    """
    require_loopback(host)
    token = ""
    if metrics_token is not None:
        require_exporter()
        token = read_token_file(metrics_token)
    server = DashboardServer(port, app_of, token)
    server.run(lambda: _say(server.entry))
    return 0


def _say(entry: DashboardCredentials) -> None:
    if entry.scrape_token:
        print(f"metrics for Prometheus: http://{HOST}:{entry.port}{METRICS_PATH}, with the token as a bearer token")
        if not sys.stdout.isatty():  # perhaps a log that others read, and the link opens every page
            print(
                "the link to the dashboard is printed only in a terminal: start it there to see the pages", flush=True
            )
            return
    print(f"dashboard: {entry.link}")
    print("anyone with this link can see everything but change nothing; from another machine, first run:")
    print(f"  ssh -N -L {entry.port}:{HOST}:{entry.port} THIS-MACHINE")
    print("Ctrl-C stops it", flush=True)
