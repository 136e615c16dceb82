"""Answers of any size: Flower's own clients read them, and with the limit they are refused and not asked again."""

from __future__ import annotations

import concurrent.futures
import gzip
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest
from flwr.proto.message_pb2 import PullObjectResponse

from fedveil.errors import WireError
from fedveil.guard import flower
from fedveil.guard.flower import response_sizes
from fedveil.guard.flower.retries import RetryPolicy, is_too_large

SPEAKS = flower.installed_release().speaks
LIMIT = 100_000
FITS = PullObjectResponse(object_content=b"x" * (LIMIT - 1000)).SerializeToString()
LARGE = PullObjectResponse(object_content=bytes(LIMIT)).SerializeToString()


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_sizes, "MAX_RESPONSE_BYTES", LIMIT)


class _Answers(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        answer = FITS if details.method.endswith("fits") else LARGE
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)


@pytest.mark.skipif(SPEAKS != "gRPC", reason="SuperNodes of this Flower speak HTTP")
def test_a_larger_answer_over_grpc_is_refused_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.grpc import create_channel

    for name in ("secure_channel", "insecure_channel"):
        monkeypatch.setattr(grpc, name, getattr(grpc, name))  # put back afterwards
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Answers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def ask(what: str) -> bytes:
        with create_channel(f"127.0.0.1:{port}", insecure=True) as channel:
            return bytes(channel.unary_unary(f"/fleet/{what}")(b"", timeout=30))

    assert ask("large") == LARGE  # Flower's own channel
    response_sizes.limit_grpc_responses()
    assert ask("fits") == FITS
    with pytest.raises(grpc.RpcError) as refused:
        ask("large")
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    class Invoker:
        invoke, should_giveup = None, staticmethod(lambda _error: True)

    assert RetryPolicy(Invoker()).should_give_up(refused.value)
    server.stop(0)


_PEAK = """
import sys
import grpc
from fedveil.guard.flower.response_sizes import limit_grpc_responses

def read_peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

limit_grpc_responses()
with grpc.insecure_channel(sys.argv[1]) as channel:
    assert channel.unary_unary("/fleet/fits")(b"", timeout=30)
    before = read_peak()
    try:
        channel.unary_unary("/fleet/zeros")(b"", timeout=30)
    except grpc.RpcError as error:
        print((read_peak() - before) << 10, error.code().name, error.details())
"""


@pytest.mark.skipif(SPEAKS != "gRPC", reason="SuperNodes of this Flower speak HTTP")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_compressed_answer_over_grpc_is_inflated_to_the_limit_at_most() -> None:
    class Zeros(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            answer = b"1" if details.method.endswith("fits") else bytes(64 << 20)
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)

    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(2),
        compression=grpc.Compression.Gzip,
        options=[("grpc.max_send_message_length", -1)],
    )
    server.add_generic_rpc_handlers((Zeros(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = subprocess.run(
        [sys.executable, "-c", _PEAK, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=60, check=True
    )
    server.stop(0)
    peak, status, details = client.stdout.strip().split(" ", 2)
    assert int(peak) < 32 << 20

    class Refused(Exception):
        def code(self) -> Any:
            return grpc.StatusCode[status]

        def details(self) -> str:
            return details

    assert is_too_large(Refused())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.encodings.append(self.headers.get("accept-encoding"))  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers.get("content-length", 0)))
        how, body = self.path.strip("/").split("-")
        content = {"fits": FITS, "large": LARGE}[body]
        self.send_response(500 if how == "error" else 200)
        if how == "gzip":
            content = gzip.compress(content)
            self.send_header("content-encoding", "gzip")
        if how == "chunked":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for start in range(0, len(content), 10_000):
                part = content[start : start + 10_000]
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client has closed, as it should

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    machine = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    machine.encodings = []  # type: ignore[attr-defined]
    threading.Thread(target=machine.serve_forever, daemon=True).start()
    yield machine
    machine.shutdown()
    machine.server_close()


@pytest.mark.skipif(SPEAKS != "HTTP", reason="SuperNodes of Flower 1.39 speak gRPC")
def test_a_larger_answer_over_http_is_refused(monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer) -> None:
    client_class = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient

    def ask(path: str) -> bytes:
        with client_class.from_server_address(f"127.0.0.1:{server.server_port}", True, None, []) as client:
            answer = client._unary_unary(
                path=path, rpc_method="PullObject", request=PullObjectResponse(), response_type=PullObjectResponse
            )
            return bytes(answer.SerializeToString())

    for how in ("length", "chunked", "gzip"):
        assert ask(f"{how}-large") == LARGE  # Flower's own client
    monkeypatch.setattr(client_class, "__init__", client_class.__init__)  # put back afterwards
    response_sizes.limit_http_responses()
    for how in ("length", "chunked"):
        assert ask(f"{how}-fits") == FITS
        with pytest.raises(WireError, match=f"more than {LIMIT} bytes"):
            ask(f"{how}-large")
    with pytest.raises(WireError, match=f"more than {LIMIT} bytes"):
        ask("error-large")
    with pytest.raises(httpx.HTTPStatusError):
        ask("error-fits")
    for body in ("fits", "large"):
        with pytest.raises(WireError, match="compressed response, which is not accepted"):
            ask(f"gzip-{body}")
    assert server.encodings[-1] == "identity"  # type: ignore[attr-defined]
