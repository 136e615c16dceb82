"""A fleet port of either line that answers as a script says, behind a router that can cut TLS handshakes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flwr.proto import fleet_pb2, heartbeat_pb2

from fedveil.console.flower.certificates import new_ca, write_certificate, write_server
from fedveil.guard import flower

SPEAKS = flower.installed_release().speaks
HTTP_STATUS = {"INTERNAL": 500, "RESOURCE_EXHAUSTED": 429, "PERMISSION_DENIED": 403,
               "UNAUTHENTICATED": 401}  # fmt: skip
GOOD: dict[str, Any] = {
    "ActivateNode": fleet_pb2.ActivateNodeResponse(node_id=7),
    "DeactivateNode": fleet_pb2.DeactivateNodeResponse(),
    "SendNodeHeartbeat": heartbeat_pb2.SendNodeHeartbeatResponse(success=True),
    "PullMessages": fleet_pb2.PullMessagesResponse(),
}


class FakeFleet:
    """Counts what it is asked. `script`: by call, the statuses to answer next; "" = well, "no" = success is false."""

    def __init__(self, folder: Path, script: dict[str, list[str]] | None = None) -> None:
        self.script, self.asked, self.answered = script or {}, Counter[str](), Counter[str]()
        self._lock = threading.Lock()
        ca, key = new_ca("CA", timedelta(days=1))
        write_certificate(folder / "ca.crt", ca)
        write_server(folder, ca, key, ["localhost"], timedelta(days=1))
        self.ca, self._folder = folder / "ca.crt", folder
        self._cuts, self._open = 0, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"

    def cut(self, handshakes: int) -> None:
        """Ends all connections, and answers so many TLS handshakes with garbage, on HTTP with none."""
        self._cuts = handshakes
        for link in self._open:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    @property
    def cuts_left(self) -> int:
        return max(self._cuts, 0)

    def answer(self, call: str) -> tuple[str, bytes]:
        """Its status, "" for a good one, and the body."""
        with self._lock:
            self.asked[call] += 1
            left = self.script.get(call, [])
            status = left.pop(0) if left else ""
            if status == "no":
                return "", heartbeat_pb2.SendNodeHeartbeatResponse(success=False).SerializeToString()
            self.answered[call] += not status
            return status, b"" if status else GOOD[call].SerializeToString()

    @contextlib.contextmanager
    def serving(self) -> Iterator[FakeFleet]:
        with (self._grpc if SPEAKS == "gRPC" else self._http)() as port:
            threading.Thread(target=self._route, args=(port,), daemon=True).start()
            try:
                yield self
            finally:
                self._listener.close()
                self.cut(0)

    @contextlib.contextmanager
    def _grpc(self) -> Iterator[int]:
        import grpc

        fleet = self

        class Handler(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                call = details.method.rpartition("/")[2]

                def called(_request: bytes, context: Any) -> bytes:
                    status, body = fleet.answer(call)
                    if status:
                        context.abort(grpc.StatusCode[status], "as the script says")
                    return body

                return grpc.unary_unary_rpc_method_handler(called)

        server = grpc.server(ThreadPoolExecutor(8))
        server.add_generic_rpc_handlers((Handler(),))
        pair = ((self._folder / "server.key").read_bytes(), (self._folder / "server.pem").read_bytes())
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
        server.start()
        yield port
        server.stop(0)

    @contextlib.contextmanager
    def _http(self) -> Iterator[int]:
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                call = "".join(word.capitalize() for word in self.path.rpartition("/")[2].split("-"))
                status, body = fleet.answer(call)
                self.send_response(HTTP_STATUS[status] if status else 200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing: a line for each question."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()

    def _route(self, port: int) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._cuts > 0:
                self._cuts -= 1
                with contextlib.suppress(OSError):
                    if SPEAKS == "gRPC":
                        client.recv(65536)
                        client.sendall(b"no handshake of TLS\r\n" * 20)
                    client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            self._open += [client, server]
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for link in (one, other):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
