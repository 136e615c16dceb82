"""A server on loopback that speaks TLS and nothing else: as a fleet port looks to who knocks."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.guard import flower

SITES = ("h2",) if flower.installed_release().speaks == "gRPC" else ("http/1.1",)
SITES_ALONE = (
    b'HTTP/1.1 404 Not Found\r\n\r\n{"code": 0, "detail": "fedveil: this port serves sites, at /v1/fleet alone"}'
)


@contextmanager
def tls_server(folder: Path, speaks: tuple[str, ...] = SITES, says: bytes = SITES_ALONE) -> Iterator[str]:
    """A server with server.pem and server.key of `folder` for one connection; gives HOST:PORT.

    Args:
        speaks: by ALPN; default: what this installation's Flower speaks with sites.
        says: its answer to whatever is asked, where it speaks HTTP.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.set_alpn_protocols(speaks)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def serve() -> None:
            try:
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as link:
                    link.recv(4096)
                    if "h2" not in speaks:
                        link.sendall(says)
            except OSError:
                return  # the client hung up, as it must where it does not trust us

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"localhost:{listener.getsockname()[1]}"
        thread.join(10)
