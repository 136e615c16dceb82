"""A connection that carries nothing any more: found and made anew, beside Flower's own, which waits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import pytest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.grpc import create_channel

from fedveil.guard.flower import keepalive


class Relay:
    """A router between one client and one server. After `dark` its old connections stay open and carry nothing."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.flowing = threading.Event()
        self.flowing.set()
        self._lit: list[threading.Event] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def dark(self) -> None:
        """What is open now carries nothing from here on; what comes later does."""
        for lit in self._lit:
            lit.clear()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server))
            lit = threading.Event()
            lit.set()
            self._lit.append(lit)
            self.connections += 1
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(one, other, lit), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, lit: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.flowing.wait()
                if lit.is_set():
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)


class _Echo(grpc.GenericRpcHandler):
    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: request)


@pytest.fixture
def relay() -> Iterator[Relay]:
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Relay(port)
    server.stop(0)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("secure_channel", "insecure_channel"):
        monkeypatch.setattr(grpc, name, getattr(grpc, name))  # puts them back afterwards
    keepalive.patch_supernode_keepalive(seconds=1, timeout=2, data_timeout=60)


def _again(ask: grpc.UnaryUnaryMultiCallable, question: bytes, seconds: float) -> bytes:
    """Ask until it is answered, as Flower does: with limits this short a busy machine loses a good connection too."""
    until = time.monotonic() + seconds
    while True:
        try:
            return ask(question, timeout=20)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise


def _asked(relay: Relay) -> tuple[grpc.Channel, grpc.UnaryUnaryMultiCallable]:
    channel = create_channel(f"127.0.0.1:{relay.port}", insecure=True)  # as Flower's SuperNode makes it
    ask = channel.unary_unary("/fleet/PullMessages")
    assert _again(ask, b"one", seconds=60) == b"one"
    time.sleep(0.5)  # gRPC's own ping after an answer is over: what finds the dark is the one of the limits
    relay.dark()
    return channel, ask


@pytest.mark.long
def test_a_question_into_the_dark_ends_and_the_next_one_is_answered(kept: None, relay: Relay) -> None:
    channel, ask = _asked(relay)
    connections = relay.connections
    with pytest.raises(grpc.RpcError) as caught:
        ask.future(b"two").result(timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # what Flower tries again
    assert _again(ask, b"three", seconds=60) == b"three"
    assert relay.connections > connections
    channel.close()


@pytest.mark.long
def test_flowers_own_channel_would_still_wait(relay: Relay) -> None:
    channel, ask = _asked(relay)
    question = ask.future(b"two")
    with pytest.raises(grpc.FutureTimeoutError):
        question.result(timeout=4)
    question.cancel()
    channel.close()


@pytest.mark.long
def test_a_part_may_take_longer_than_a_dead_line_and_a_poll_may_not(kept: None, relay: Relay) -> None:
    """The relay keeps everything back for 6 s, as a slow line does with what is sent behind a large part."""
    channel = create_channel(f"127.0.0.1:{relay.port}", insecure=True)
    poll, part = (channel.unary_unary(f"/flwr.proto.Fleet/{name}") for name in ("PullMessages", "PullObject"))
    assert _again(poll, b"one", seconds=60) == _again(part, b"one", seconds=60) == b"one"
    time.sleep(0.5)
    relay.flowing.clear()
    threading.Timer(6.0, relay.flowing.set).start()
    waiting, ended = part.future(b"large", timeout=60), poll.future(b"two", timeout=60)
    with pytest.raises(grpc.RpcError) as caught:
        ended.result()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert waiting.result() == b"large"
    channel.close()


def test_bundles_and_parts_of_messages_have_a_connection_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[dict[str, int], list[str]]] = []

    class Fake(grpc.Channel):
        def __init__(self, options: list[tuple[str, int]]) -> None:
            made.append((dict(options), []))
            self.methods = made[-1][1]

        def unary_unary(self, method: str, *_args: object, **_kwargs: object) -> None:
            self.methods.append(method.rpartition("/")[2])

        def _never(self, *_args: object) -> None:
            raise AssertionError("not called")

        subscribe = unsubscribe = unary_stream = stream_unary = stream_stream = close = __enter__ = __exit__ = _never

    monkeypatch.setattr(grpc, "secure_channel", None)
    monkeypatch.setattr(grpc, "insecure_channel", lambda _address, options: Fake(options))
    keepalive.patch_supernode_keepalive()
    FleetStub(grpc.insecure_channel("127.0.0.1:1", options=[("grpc.max_receive_message_length", 4321)]))
    (control, polls), (data, parts) = made
    assert sorted(parts) == sorted(keepalive.DATA_CALLS)
    assert {"PullMessages", "SendNodeHeartbeat", "PushMessages"} <= set(polls)
    assert control["grpc.max_receive_message_length"] == data["grpc.max_receive_message_length"] == 4321
    for options, milliseconds in ((control, 10_000), (data, 300_000)):
        assert options["grpc.keepalive_time_ms"] == 15_000
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == milliseconds
        assert (options["grpc.http2.bdp_probe"], options["grpc.http2.lookahead_bytes"]) == (0, 512 * 1024)
    assert "grpc.client_idle_timeout_ms" not in control
    assert data["grpc.client_idle_timeout_ms"] == 60_000  # else a firewall forgets it between rounds
    # found and tried again before the server calls the site gone
    assert keepalive.SECONDS + keepalive.TIMEOUT + keepalive.AGAIN < 60


def test_a_channel_of_two_connections_reports_the_first_and_closes_both() -> None:
    calls: list[str] = []

    def fake(name: str) -> SimpleNamespace:
        every = ("subscribe", "unsubscribe", "close", "unary_stream", "stream_unary", "stream_stream")
        return SimpleNamespace(**{each: lambda *_, each=each: calls.append(f"{name} {each}") for each in every})

    with keepalive.SplitChannel(fake("control"), fake("data")) as channel:
        channel.subscribe(print, True)
        channel.unsubscribe(print)
        for kind in ("unary_stream", "stream_unary", "stream_stream"):
            getattr(channel, kind)("/a/PushObject")
            getattr(channel, kind)("/a/PushObjects")
    assert calls[:2] == ["control subscribe", "control unsubscribe"]
    assert calls[2:4] == ["data unary_stream", "control unary_stream"]
    assert calls[6:] == ["data stream_stream", "control stream_stream", "control close", "data close"]
