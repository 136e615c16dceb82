"""A server that sends a SuperNode on to a machine of the site's own network, against Flower's own client."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from fedveil.guard import flower

if flower.installed_release().speaks != "HTTP":
    pytest.skip("SuperNodes of Flower 1.39 speak gRPC", allow_module_level=True)

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedveil.guard.flower import redirects


class Machine(HTTPServer):
    """Answers with a status, and where to go on; what was asked of it."""

    def __init__(self, status: int, location: str = "") -> None:
        self.status, self.location, self.asked = status, location, []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Machine

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.command, self.path))
        self.send_response(self.server.status)
        self.send_header("location", self.server.location)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def inside() -> Iterator[Machine]:
    machine = Machine(200)
    yield machine
    machine.shutdown()
    machine.server_close()


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_supernode_is_not_sent_on(status, inside, monkeypatch):
    server = Machine(status, f"http://{inside.address}/admin")

    def ask() -> None:
        with FleetHttpClient.from_server_address(server.address, True, None, []) as client:
            client.PullMessages(PullMessagesRequest())

    ask()  # Flower's own goes there
    assert [path for _, path in inside.asked] == ["/admin"]
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)  # put back afterwards
    redirects.forbid_redirects()
    with pytest.raises(httpx.HTTPStatusError, match=str(status)):
        ask()
    assert len(inside.asked) == 1
    server.shutdown()
    server.server_close()


def test_flowers_client_is_the_one_that_a_supernode_uses():
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    assert connection.FleetHttpClient is FleetHttpClient
    assert issubclass(FleetHttpClient, ProtobufClient)
