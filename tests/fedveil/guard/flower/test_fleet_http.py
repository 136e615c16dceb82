"""The port of sites from Flower 1.41 on, attacked by a stranger, a site whose day is over, and one that wants more."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from http.client import HTTPConnection

import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)

from fedveil.guard import fleet_limits as limits
from fedveil.guard import flower, superlink
from fedveil.guard.flower import RefusalBehavior, fleet_http
from fedveil.guard.flower.fleet_http import PUBLIC_KEY, SIGNATURE
from fedveil.guard.open_calls import OpenCalls

KEYS = [generate_key_pairs() for _ in range(2)]
(SITE, _), (OTHER, _) = KEYS
PULL, ACTIVATE = "/v1/fleet/pull-messages", "/v1/fleet/activate-node"


def pem(key) -> bytes:
    return public_key_to_bytes(key.public_key())


def headers(key=SITE, stamp=None, signs=None, public=None, length="5") -> dict[str, str]:
    """Of a request that `key` signed now; each part can be another."""
    stamp = stamp or now().isoformat()
    signature = sign_message(signs or key, stamp.encode())
    public = b64encode(public or pem(key)).decode()
    about = {PUBLIC_KEY: public, TIMESTAMP_HEADER: stamp, SIGNATURE: b64encode(signature).decode()}
    return about | {"content-length": length}


class Port:
    """The port with one member; what came through to Flower."""

    def __init__(self, refused: tuple[RefusalBehavior, str] | None = None) -> None:
        self.came: list[str] = []
        self.judged: list[tuple[bytes, bool]] = []
        self.refused, self.knows = refused, True

    def is_known(self, key: bytes) -> bool:
        bytes_to_public_key(key)  # which raises for what is no key, as the registry does
        return self.knows

    async def flower(self, scope, receive, send) -> None:
        self.came.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"flower"})

    def refusal(self, key: bytes, activates: bool) -> tuple[RefusalBehavior, str] | None:
        self.judged.append((key, activates))
        return self.refused

    def ask(self, path=PULL, method="POST", kind="http", given=None, more=()) -> tuple[int, str]:
        """Status and the refusal's words."""
        sent: list[dict] = []
        request_headers = [(name.encode(), value.encode("latin-1")) for name, value in (given or headers()).items()]
        scope = {"type": kind, "path": path, "method": method, "headers": [*request_headers, *more]}

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"12345", "more_body": False}

        asyncio.run(fleet_http.sites_only(self.flower, self.refusal, self.is_known)(scope, receive, send))
        if kind != "http":
            assert [message["type"] for message in sent] == ["websocket.close"]
            return 0, ""
        body = sent[1]["body"]
        return sent[0]["status"], json.loads(body)["detail"] if body != b"flower" else ""


def test_a_member_reaches_flower_and_what_is_judged_is_the_key_that_signed():
    port = Port()
    assert port.ask() == (200, "")
    assert port.ask(ACTIVATE) == (200, "")
    assert port.came == [PULL, ACTIVATE]
    assert port.judged == [(pem(SITE), False), (pem(SITE), True)]


@pytest.mark.parametrize(
    "path,method,kind",
    [
        ("/v1/control/start-run", "POST", "http"), ("/v1/runtime/acquire-task", "POST", "http"),
        ("/v1/runtime/push-object", "POST", "http"), ("/health", "GET", "http"), ("/docs", "GET", "http"),
        ("/openapi.json", "GET", "http"), ("/", "POST", "http"), (PULL, "GET", "http"), (PULL, "OPTIONS", "http"),
        ("/v1/fleet/../control/start-run", "POST", "http"), ("/v1/fleet//pull-messages", "POST", "http"),
        ("//v1/fleet/pull-messages", "POST", "http"), ("/V1/fleet/pull-messages", "POST", "http"),
        (f"{PULL}/", "POST", "http"), (f"{PULL}\n", "POST", "http"), ("/v1/fleet/", "POST", "http"),
        ("/v1/fleet/" + "a" * 61, "POST", "http"), (PULL, "POST", "websocket"), ("/v1/control/x", "", "websocket"),
    ],
)  # fmt: skip
def test_a_member_reaches_nothing_else(path, method, kind):
    port = Port()
    status, why = port.ask(path, method, kind)
    assert (status, why) in {(404, "fedveil: this port serves sites, at /v1/fleet alone"), (0, "")}
    assert not port.came
    assert not port.judged


def _rsa() -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return rsa.generate_private_key(65537, 2048).public_key().public_bytes(serialization.Encoding.PEM, form)


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"content-length": "5"},
        lambda: headers(signs=OTHER),
        lambda: headers(public=b"-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----\n"),
        lambda: headers(public=_rsa()),
        lambda: headers(stamp=now().replace(tzinfo=None).isoformat()),
        lambda: headers(stamp="yesterday"),
        lambda: {**headers(), SIGNATURE: "!!"},
        lambda: {**headers(), SIGNATURE: ""},
        lambda: {**headers(), PUBLIC_KEY: "\xff"},
        lambda: {**headers(), PUBLIC_KEY: b64encode(pem(OTHER)).decode()},
        lambda: {**headers(), PUBLIC_KEY: "A" * 5000},
    ],
)
def test_who_signs_nothing_or_something_else_is_a_stranger(given):
    """Signed when the test runs: what was signed as the tests were collected is minutes old, and no longer ahead."""
    port = Port()
    status, why = port.ask(given=given())
    assert status == 401
    assert why.startswith("fedveil: ")
    assert not port.came
    assert not port.judged  # or a stranger could write into the log of keys that were shut out


def test_a_header_that_stands_twice_is_none():
    """Or this port could judge one key, and Flower another."""
    port, second = Port(), headers(OTHER)
    for name in (PUBLIC_KEY, SIGNATURE, TIMESTAMP_HEADER):
        assert port.ask(more=[(name.upper().encode(), second[name].encode())])[0] == 401
    assert port.ask(more=[(b"content-length", b"5")])[0] == 411
    assert not port.came


@pytest.mark.parametrize(("ahead", "words"), [(60, "60 s ahead of"), (-400, "400 s behind")])
def test_a_site_whose_clock_is_off_is_told_and_asks_again(ahead, words):
    """401 would end its SuperNode for good, also where it is the server's clock that jumped."""
    port = Port()
    status, why = port.ask(given=headers(stamp=(now() + timedelta(seconds=ahead)).isoformat()))
    assert status == 503
    assert why.startswith(f"fedveil: the site's clock is {words}")
    assert not port.came


@pytest.mark.parametrize(
    "path,length,status",
    [
        (PULL, "65536", 200), (PULL, "65537", 413), (PULL, "9" * 13, 411), (PULL, "-1", 411), (PULL, "", 411),
        (PULL, "5, 5", 411), (ACTIVATE, "65537", 413), ("/v1/fleet/push-messages", "2097152", 200),
        ("/v1/fleet/push-messages", "2097153", 413), ("/v1/fleet/push-object", "8388608", 200),
        ("/v1/fleet/push-object", "8388609", 413),
    ],
)  # fmt: skip
def test_a_request_says_how_long_it_is_and_is_not_too_long(path, length, status):
    assert Port().ask(path, given=headers(length=length))[0] == status


def test_of_a_key_that_nobody_registered_no_signature_is_looked_at(monkeypatch):
    """A stranger draws a new key for every call; to check a signature takes half a millisecond."""
    port = Port((RefusalBehavior.ENDS, "fedveil: this key is not registered"))
    port.knows = False
    monkeypatch.setattr(fleet_http, "check_signed_time", None)
    assert port.ask() == (401, "fedveil: this key is not registered")
    assert port.judged == [(pem(SITE), False)]


def test_a_key_that_was_registered_a_moment_ago_signs_as_every_other():
    port = Port()  # it refuses nobody
    port.knows = False
    assert port.ask() == (200, "")
    assert port.ask(given=headers(signs=OTHER))[0] == 401


def bodies(port: Port, calls: OpenCalls, count: int, seconds: float = 0.2) -> list[int]:
    """Statuses of requests of one key at once whose bodies do not come, in the order of their start."""
    statuses = [0] * count

    async def never():
        await asyncio.sleep(60)

    async def ask(number: int) -> None:
        async def send(message):
            statuses[number] = message.get("status", statuses[number])

        found = [(name.encode(), value.encode("latin-1")) for name, value in headers().items()]
        scope = {"type": "http", "path": PULL, "method": "POST", "headers": found}
        await fleet_http.sites_only(port.flower, port.refusal, port.is_known, calls)(scope, never, send)

    async def all_of_them() -> None:
        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    return statuses


def test_a_ninth_call_without_a_body_ends_the_oldest():
    calls = OpenCalls()
    statuses = bodies(Port(), calls, limits.MAX_OPEN_CALLS + 2)
    assert statuses == [503, 503] + [0] * limits.MAX_OPEN_CALLS
    assert calls.count() == 0


@pytest.mark.long
def test_a_call_without_a_body_ends(monkeypatch):
    monkeypatch.setattr(limits, "MAX_BODY_SECONDS", 0.1)
    assert bodies(Port(), OpenCalls(), 2, seconds=1.0) == [503, 503]


def test_flower_reads_the_body_that_came():
    read: list[bytes] = []

    async def flower(scope, receive, send) -> None:
        read.append((await receive())["body"])

    parts = [b"12", b"345"]

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    found = [(name.encode(), value.encode("latin-1")) for name, value in headers().items()]
    scope = {"type": "http", "path": PULL, "method": "POST", "headers": found}
    asyncio.run(fleet_http.sites_only(flower, Port().refusal)(scope, receive, None))
    assert read == [b"12345"]


@pytest.mark.parametrize(
    "answer,status", [(RefusalBehavior.SAYS_WHY, 412), (RefusalBehavior.ENDS, 401), (RefusalBehavior.ASKS_AGAIN, 503)]
)
def test_a_key_that_is_not_permitted_is_told_so(answer, status):
    port = Port((answer, "fedveil: its expiry date has passed"))
    assert port.ask() == (status, "fedveil: its expiry date has passed")
    assert not port.came


@pytest.fixture
def served(monkeypatch) -> Iterator[tuple[Port, int, int]]:
    """uvicorn with both ports, as the guard's SuperLink has it: what operators ask, and what sites ask."""
    monkeypatch.setattr(uvicorn.Config, "__init__", uvicorn.Config.__init__)  # put back afterwards
    monkeypatch.setattr(uvicorn.Server, "run", uvicorn.Server.run)
    port = Port()

    def control(app):
        async def asked(scope, receive, send):
            if scope["type"] == "lifespan":
                return
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": str(scope["client"][1]).encode()})

        return asked

    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    fronts = superlink.PortProxies(
        control, lambda app: fleet_http.sites_only(app, port.refusal), ("127.0.0.1", ports[1])
    )
    fronts.serve()
    server = uvicorn.Server(
        uvicorn.Config(port.flower, host="127.0.0.1", port=ports[0], log_config=None, lifespan="off", ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield port, ports[0], ports[1]
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def asked(port: int, path: str, given: dict[str, str]) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", path, b"12345", given)
    answer = connection.getresponse()
    result = answer.status, answer.read()
    connection.close()
    return result


def test_the_port_that_a_request_came_in_by_decides_and_no_header(served):
    port, control, sites = served
    assert asked(sites, PULL, headers()) == (200, b"flower")
    lies = {"Host": f"127.0.0.1:{sites}", "X-Forwarded-Port": str(sites), "X-Forwarded-Host": f"x:{sites}"}
    assert asked(control, PULL, headers() | lies)[0] == 403
    lies = {"Host": f"127.0.0.1:{control}/v1/control/list-runs?", "X-Forwarded-For": "127.0.0.1:1"}
    assert asked(sites, "/v1/control/list-runs", headers() | lies)[0] == 404
    assert asked(sites, PULL, headers(OTHER) | {"Host": f"127.0.0.1:{control}"}) == (200, b"flower")
    assert port.came == [PULL, PULL]


def test_no_line_is_logged_for_each_question_of_a_site(served):
    assert uvicorn.Config("app", access_log=True, log_config=None).access_log is False  # as Flower asks for it


def test_whose_a_connection_is_says_no_header_either(served):
    """fedveil/guard/loopback_ports.py asks the kernel about the address that uvicorn names."""
    _, control, _ = served
    status, client = asked(control, "/", {"X-Forwarded-For": "127.0.0.1:4711"})
    assert status == 403
    assert client != b"4711"


def test_a_port_that_is_taken_ends_the_process_in_words(monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "run", uvicorn.Server.run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet_http.add_listener("127.0.0.1", port)
        with pytest.raises(SystemExit, match=rf"fleet-port: the port at 127\.0\.0\.1:{port} is not available"):
            uvicorn.Server(uvicorn.Config("app", port=0)).run()


@pytest.mark.skipif(flower.installed_release().speaks != "HTTP", reason="Flower 1.39 has no such headers and routes")
def test_the_headers_and_routes_are_flowers():
    constants = importlib.import_module("flwr.supercore.constant")
    assert (PUBLIC_KEY, SIGNATURE) == (constants.FLEET_HTTP_PUBLIC_KEY_HEADER, constants.FLEET_HTTP_SIGNATURE_HEADER)
    router = importlib.import_module("flwr.superlink.routers.fleet.router").router
    paths = {route.path for route in router.routes}
    assert ACTIVATE in paths
    assert all(fleet_http._PATH.fullmatch(path) for path in paths)
