from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import subprocess
import sys

import pytest
import uvicorn

from fedveil.guard import loopback_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
ME = 4711  # no user of any connection here


@pytest.fixture
def connection():
    """Both ends of a TCP connection on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield client, server


def answered(*scopes) -> list[int]:
    """The status of what is sent, for one request after the other; 200 where the application was asked."""
    sent = []

    async def app(scope, receive, send):
        sent.append(200)

    async def send(message):
        sent.append(message.get("status"))

    async def requests():
        asked = loopback_ports.close_to_other_users(app)
        for scope in scopes:
            await asked(scope, None, send)

    asyncio.run(requests())
    return [status for status in sent if status]


def test_the_kernel_says_whose_a_connection_is(connection, monkeypatch):
    client, server = connection
    ends = client.getsockname(), server.getsockname()
    scope = {"type": "http", "client": ends[0], "server": ends[1]}
    assert loopback_ports.connection_owner(*ends) == loopback_ports.os.geteuid()
    assert answered(scope) == [200]
    monkeypatch.setattr(loopback_ports, "connection_owner", lambda *ends: 1000)
    monkeypatch.setattr(loopback_ports.os, "geteuid", lambda: ME)
    assert answered(scope) == [403]
    monkeypatch.setattr(loopback_ports, "connection_owner", lambda *ends: 0)
    assert answered(scope) == [200]


def test_the_kernel_is_asked_once_a_connection_and_anew_for_another_one_from_the_same_port(monkeypatch):
    asked = []
    monkeypatch.setattr(
        loopback_ports,
        "connection_owner",
        lambda *ends: asked.append(ends) or [loopback_ports.os.geteuid(), ME, 0][len(asked) - 1],
    )
    ends = [["127.0.0.1", 5000], ["127.0.0.1", 5000], ["127.0.0.1", 5001]]
    mine, taken_over, roots = ({"type": "http", "client": tuple(of), "server": ("127.0.0.1", 1)} for of in ends)
    assert mine["client"] == taken_over["client"]
    assert answered(mine, mine, dict(mine), taken_over, taken_over | {"client": mine["client"]}) == [
        200,
        200,
        200,
        403,
        200,
    ]
    assert len(asked) == 2
    asked.clear()
    monkeypatch.setattr(loopback_ports, "connection_owner", lambda *ends: asked.append(ends) or 0)
    monkeypatch.setattr(loopback_ports, "_MOST_KNOWN", 1)
    assert answered(mine, roots, roots, mine) == [200] * 4
    assert len(asked) == 3


def test_who_was_refused_is_asked_about_again(monkeypatch):
    asked = []
    monkeypatch.setattr(loopback_ports, "connection_owner", lambda *ends: asked.append(ends))
    scope = {"type": "http", "client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 1)}
    assert answered(scope, scope) == [403, 403]
    assert len(asked) == 2


def test_uvicorn_makes_one_address_a_connection(monkeypatch):
    """Two requests on one connection, and one on another: the kernel is asked twice."""
    asked, real = [], loopback_ports.connection_owner
    monkeypatch.setattr(loopback_ports, "connection_owner", lambda *ends: asked.append(ends) or real(*ends))

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def requests(port):
        for of_one in (2, 1):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                for _ in range(of_one):
                    connection.request("POST", "/", b"x")
                    assert connection.getresponse().read() == b""

    async def served(listener):
        server = uvicorn.Server(
            uvicorn.Config(loopback_ports.close_to_other_users(app), log_level="error", lifespan="off", ws="none")
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.to_thread(requests, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(served(listener))
    assert len(asked) == 2


def test_a_connection_that_its_user_has_closed_is_not_taken_for_roots(connection):
    """The kernel's table says user 0 for such a socket."""
    client, server = connection
    ends = client.getsockname(), server.getsockname()
    client.sendall(b"POST / HTTP/1.1\r\n\r\n")
    client.close()
    assert loopback_ports.connection_owner(*ends) is None
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


@pytest.mark.long
def test_memory_of_a_slice_is_used_again_and_not_given_back_to_the_kernel():
    """In a process of its own, as Flower's programs start: page faults of twenty slices, one after the other."""
    code = """
import resource, sys
from fedveil.guard import loopback_ports
assert sys.argv[1] != "kept" or loopback_ports.keep_blocks()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
one = bytes(5 << 18)
before = faults()
for _ in range(20):
    one = None
    one = b"x" * (5 << 18)
print(faults() - before)
"""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    reuse_faults, given_back = (
        int(subprocess.run([sys.executable, "-c", code, how], env=env, capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    )
    assert reuse_faults < given_back / 4


def test_the_start_of_the_program_passes_and_nothing_else(connection):
    assert answered({"type": "lifespan"}) == [200]
    assert answered({"type": "websocket", "client": None, "server": None}) == []
