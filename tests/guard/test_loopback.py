from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from fedveil.guard import loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
ME = 4711  # no user of any connection here


@pytest.fixture
def connection():
    """Both ends of a TCP connection on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield client, server


def answered(scope) -> list[int]:
    """The status of what is sent; 200 where the application was asked."""
    sent = []

    async def app(scope, receive, send):
        sent.append(200)

    async def send(message):
        sent.append(message.get("status"))

    asyncio.run(loopback.closed_to_others(app)(scope, None, send))
    return [status for status in sent if status]


def test_the_kernel_says_whose_a_connection_is(connection, monkeypatch):
    client, server = connection
    ends = client.getsockname(), server.getsockname()
    scope = {"type": "http", "client": ends[0], "server": ends[1]}
    assert loopback.owner(*ends) == loopback.os.geteuid()
    assert answered(scope) == [200]
    monkeypatch.setattr(loopback, "owner", lambda *ends: 1000)
    monkeypatch.setattr(loopback.os, "geteuid", lambda: ME)
    assert answered(scope) == [403]
    monkeypatch.setattr(loopback, "owner", lambda *ends: 0)
    assert answered(scope) == [200]


def test_a_connection_that_its_user_has_closed_is_not_taken_for_roots(connection):
    """The kernel's table says user 0 for such a socket."""
    client, server = connection
    ends = client.getsockname(), server.getsockname()
    client.sendall(b"POST / HTTP/1.1\r\n\r\n")
    client.close()
    assert loopback.owner(*ends) is None
    assert answered({"type": "http", "client": ends[0], "server": ends[1]}) == [403]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "client": None, "server": ("127.0.0.1", 1)},
        {"type": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)},
        {"type": "http", "client": ("::1", 1), "server": ("::1", 2)},
        {"type": "http", "client": ("192.0.2.1", 1), "server": ("127.0.0.1", 2)},
    ],
)
def test_what_the_kernel_does_not_know_is_refused(scope):
    assert answered(scope) == [403]


def test_the_start_of_the_program_passes_and_nothing_else(connection):
    assert answered({"type": "lifespan"}) == [200]
    assert answered({"type": "websocket", "client": None, "server": None}) == []
