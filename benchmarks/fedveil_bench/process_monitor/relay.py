"""A relay between sites and a server on this machine, which counts bytes and can cut connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any


class TcpRelay:
    """Forwards bytes between sites and a port on this machine.

    Args:
        server: the server's port.
        every: interval in seconds at which each connection is cut in mid-transfer, or None to cut none.

    Attributes:
        port: its listening port, on loopback.
        up, down: bytes from and to the sites.
        cuts: number of connections cut so far.
    """

    def __init__(self, server: int, every: float | None = None) -> None:
        self._server, self._every, self._ended = server, every, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.cuts, self.up, self.down = self._listener.getsockname()[1], 0, 0, 0
        self._open: set[tuple[socket.socket, socket.socket]] = set()
        self._counting = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()
        if every is not None:
            threading.Thread(target=self._cut, args=(every,), daemon=True).start()

    def close(self) -> None:
        """Cut open connections and stop listening."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the accepting thread would wait forever
        self._listener.close()
        for pair in list(self._open):
            self._end(pair)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                site, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server))
                except OSError:  # the server is not reachable, so the relay refuses the connection too
                    site.close()
                    continue
                self._open.add(pair := (site, server))
                for one, other in (pair, pair[::-1]):
                    threading.Thread(target=self._carry, args=(one, other, pair), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := one.recv(1 << 18):
                with self._counting:
                    if one is pair[0]:
                        self.up += len(data)
                    else:
                        self.down += len(data)
                other.sendall(data)
        self._end(pair)

    def _cut(self, every: float) -> None:
        while not self._ended.wait(every):
            for pair in list(self._open):
                self.cuts += 1
                self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._open.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):  # ended by the other side
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def insert_relay(federation: Any, make: Callable[[int], TcpRelay]) -> Any:
    """Return a subclass of `federation` whose sites reach the SuperLink through a relay made by `make` for its port.

    Instances have the relay as `relay`, which is None until the first site starts.
    """

    class Relayed(federation):
        _fleet_port: int
        relay: TcpRelay | None = None

        def start_site(self, name: str) -> None:
            port = self._fleet_port
            self.relay = self.relay or make(port)
            self._fleet_port = self.relay.port
            try:
                super().start_site(name)
            finally:
                self._fleet_port = port

        def stop(self) -> None:
            super().stop()
            if self.relay is not None:
                self.relay.close()

    return Relayed
