"""The slow line of core/wan delivers data unchanged and at its speed, and its connections break off as configured."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from fedveil_bench.core.shaped_line import QUEUE_BYTES, LineSpeed, ShapedLine

FAST = LineSpeed(50e6, 50e6)


class Echo(socketserver.StreamRequestHandler):
    """Sends back what it reads."""

    def handle(self) -> None:
        try:
            while content := self.request.recv(1 << 16):
                self.request.sendall(content)
        except ConnectionError:
            return


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def exchange(port: int, content: bytes) -> tuple[bytes, float]:
    """Send the content and read as much; return it with the seconds that it took."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        threading.Thread(target=connection.sendall, args=(content,), daemon=True).start()
        found = b""
        while len(found) < len(content) and (part := connection.recv(1 << 16)):
            found += part
    return found, time.monotonic() - begun


def receive_rest(connection: socket.socket) -> bytes:
    """What arrives until the connection ends, whether it is closed or reset."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(10):
            found += part
    return found


def test_bytes_arrive_unchanged_and_are_counted(echo):
    content = os.urandom(500_000)
    with ShapedLine(FAST, echo) as line:
        assert exchange(line.port, content)[0] == content
        assert (line.carried["up"], line.carried["down"]) == (500_000, 500_000)
        assert line.carried["connections"] == 1


def test_two_connections_share_the_bandwidth(echo):
    """Each sends 20,000 bytes; the line carries 100,000 bytes a second."""
    with ShapedLine(LineSpeed(1e5, 50e6), echo) as line:
        seconds: list[float] = []
        threads = [
            threading.Thread(target=lambda: seconds.append(exchange(line.port, bytes(20_000))[1])) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seconds) == 2
    assert max(seconds) >= 0.39


def test_a_byte_takes_the_delay_each_way_and_a_connection_one_more_round_trip(echo):
    with ShapedLine(LineSpeed(50e6, 50e6, delay=0.05), echo) as line:
        assert exchange(line.port, b"x")[1] >= 0.199


def test_a_sender_waits_where_the_line_is_full(echo):
    """A relay that read everything at once would hold all of it, and no sender would see a slow line."""
    with (
        ShapedLine(LineSpeed(10_000, 50e6), echo) as line,
        socket.create_connection(("127.0.0.1", line.port)) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.sendall(bytes(40 * QUEUE_BYTES))
        assert line.carried["up"] < 20_000


def test_a_stalled_line_carries_nothing_and_then_goes_on(echo):
    with ShapedLine(FAST, echo) as line:
        line.stall(0.4)
        assert exchange(line.port, b"after")[1] >= 0.39


def test_connections_break_off_again_and_again_and_new_ones_are_taken(echo):
    with ShapedLine(LineSpeed(50e6, 50e6, break_every=0.2), echo) as line:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", line.port), timeout=10) as connection:
                connection.sendall(b"x")
                assert receive_rest(connection) in (b"", b"x")
        assert line.carried["breaks"] >= 2


def test_a_server_that_is_not_there_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    with ShapedLine(FAST, closed) as line, socket.create_connection(("127.0.0.1", line.port), timeout=10) as connection:
        assert receive_rest(connection) == b""


@pytest.mark.parametrize("speed", [(0, 1), (1, -1), (1, 1, -0.1), (1, 1, 0, -1), (float("nan"), 1)])
def test_a_line_without_a_speed_is_refused(speed):
    with pytest.raises(ValueError, match="line: expected positive"):
        LineSpeed(*speed)
