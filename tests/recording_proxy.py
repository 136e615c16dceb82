"""A web proxy on loopback that notes what it is asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recording_proxy(answer: bytes = b"", name: str = "fl.hospital.invalid") -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that opens tunnels to `name` on this machine, or only gives `answer`; gives its URL and what it read."""
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def serve(link: socket.socket) -> None:
        with link:
            head = b""
            while b"\r\n\r\n" not in head and (more := link.recv(1)):
                head += more
            heads.append(head)
            word, target = head.split()[:2] if head.split()[1:] else (b"", b"")
            if answer or word != b"CONNECT" or not target.startswith(name.encode()):
                link.sendall(answer or b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", int(target.rpartition(b":")[2]))) as server:
                link.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(server, link), daemon=True)
                back.start()
                pump(link, server)
                back.join(30)

    def accept() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
