"""Calls of the gRPC port that never send their body, against Flower's own server, servicer and interceptors."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedveil.console.doctor import checks
from fedveil.guard import fleet_limits as limits
from fedveil.guard import flower
from fedveil.guard.flower import RefusalBehavior, fleet_calls, retries
from fedveil.guard.open_calls import OpenCalls

pytestmark = pytest.mark.skipif(flower.installed_release().speaks != "gRPC", reason="that port speaks HTTP")

PULL = "/flwr.proto.Fleet/PullMessages"
THREADS = 4
(SITE, _), (ROGUE, _), (STRANGER, _) = (generate_key_pairs() for _ in range(3))


def pem(key: Any) -> bytes:
    return public_key_to_bytes(key.public_key())


def signed(key: Any, by: Any = None) -> list[tuple[str, Any]]:
    stamp = now().isoformat()
    signature = sign_message(by or key, stamp.encode())
    return [(PUBLIC_KEY_HEADER, pem(key)), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature)]


class Servicer:
    """Stands behind Flower's interceptors: answers each pull, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def pull(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return PullMessagesResponse()

    def handler(self) -> Any:
        pull = grpc.unary_unary_rpc_method_handler(
            self.pull, PullMessagesRequest.FromString, PullMessagesResponse.SerializeToString
        )
        bundle = grpc.unary_unary_rpc_method_handler(lambda request, _context: bytes(len(request)), bytes, bytes)
        handlers = {"PullMessages": pull, "PushObject": pull, "GetFab": bundle, "PullObject": bundle}
        return grpc.method_handlers_generic_handler("flwr.proto.Fleet", handlers)


class Port:
    """The port: members are SITE and ROGUE."""

    def __init__(self, calls: OpenCalls) -> None:
        self.judged: list[bytes] = []
        self.servicer, self.open_calls = Servicer(), calls
        self.server = grpc.server(
            ThreadPoolExecutor(THREADS), maximum_concurrent_rpcs=THREADS, options=[("grpc.max_concurrent_streams", 999)]
        )
        self.server.add_generic_rpc_handlers((self.servicer.handler(),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def refusal(self, key: bytes, activates: bool) -> tuple[RefusalBehavior, str] | None:
        self.judged.append(key)
        return None if key in (pem(SITE), pem(ROGUE)) else (RefusalBehavior.ENDS, "fedveil: not registered")

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options)

    def ask(self, metadata: Any, body: bytes = b"", method: str = PULL) -> str:
        """The status of a call that is answered within five seconds."""
        with self.channel() as channel:
            try:
                channel.unary_unary(method)(body, metadata=metadata, timeout=5)
                return "OK"
            except grpc.RpcError as error:
                return str(error.code().name)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(grpc, "server", grpc.server)  # put back afterwards
    calls = OpenCalls()
    held: list[Port] = []
    fleet_calls.patch_grpc_server(
        fleet_calls.FleetCallInterceptor(
            lambda key, activates: held[0].refusal(key, activates), lambda key: key in (pem(SITE), pem(ROGUE)), calls
        )
    )
    held.append(Port(calls))
    yield held[0]
    held[0].server.stop(0)


def hold_open(port: Port, metadata: Any, count: int) -> tuple[grpc.Channel, list[Any], threading.Event]:
    """Calls whose body does not come."""
    end = threading.Event()

    def never() -> Iterator[bytes]:
        end.wait(30)
        return
        yield b""

    channel = port.channel()
    return channel, [channel.stream_unary(PULL).future(never(), metadata=metadata) for _ in range(count)], end


def test_a_member_is_answered(port: Port) -> None:
    assert port.ask(signed(SITE)) == "OK"
    assert port.servicer.calls == 1
    until = time.monotonic() + 5
    while port.open_calls.count():  # gRPC counts it out after it was answered
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "who", ["a fresh key", "a member's key without its signature", "no headers", "a rogue member", "the member itself"]
)
def test_calls_without_a_body_keep_nobody_out(who: str, port: Port) -> None:
    """On four threads: without the interceptor four such calls, by anybody, end the service for all."""
    metadata = {
        "a fresh key": signed(STRANGER), "a member's key without its signature": signed(SITE, STRANGER),
        "no headers": [], "a rogue member": signed(ROGUE), "the member itself": signed(SITE),
    }[who]  # fmt: skip
    bound = limits.MAX_OPEN_CALLS
    try:
        limits.MAX_OPEN_CALLS = 2  # fewer than threads: a rogue keeps as many threads as it may have calls
        channel, calls, end = hold_open(port, metadata, 20)
        began = time.monotonic()
        statuses = [port.ask(signed(SITE)) for _ in range(10)]
        assert statuses == ["OK"] * 10
        assert time.monotonic() - began < 20
        codes = {call.code().name for call in calls if call.done()}
        assert codes <= {"UNAUTHENTICATED", "UNAVAILABLE"}  # of its own calls: asks again, or no member
        end.set()
        channel.close()
    finally:
        limits.MAX_OPEN_CALLS = bound


def test_a_stranger_s_signature_is_not_looked_at(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_calls, "check_signed_time", None)
    assert port.ask(signed(STRANGER)) == "UNAUTHENTICATED"
    assert port.judged == [pem(STRANGER)]


def test_who_names_a_key_without_signing_is_not_counted(port: Port) -> None:
    for metadata in (signed(SITE, STRANGER), signed(SITE)[:2], signed(SITE) + signed(STRANGER)[:1]):
        assert port.ask(metadata) == "UNAUTHENTICATED"
    assert port.judged == []
    assert port.servicer.calls == 0
    stale = [(name, value if name != TIMESTAMP_HEADER else "2020-01-01T00:00:00+00:00") for name, value in signed(SITE)]
    assert port.ask(stale) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("ahead", "words"), [(7200, "7,200 s ahead of"), (10, "10 s ahead of"), (-7200, "7,200 s behind")]
)
def test_a_site_whose_clock_is_off_is_told_and_asks_again(port: Port, ahead: int, words: str) -> None:
    """UNAUTHENTICATED would end its SuperNode for good, also where it is the server's clock that jumped."""
    stamp = (now() + timedelta(seconds=ahead)).isoformat()
    about = {
        PUBLIC_KEY_HEADER: pem(SITE),
        TIMESTAMP_HEADER: stamp,
        SIGNATURE_HEADER: sign_message(SITE, stamp.encode()),
    }
    with port.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(PULL)(b"", metadata=list(about.items()), timeout=5)
    assert error.value.code().name == "UNAVAILABLE"
    assert error.value.details().startswith("fedveil: the site's clock is ")
    assert words in error.value.details()
    assert retries.own_words(error.value) == error.value.details()
    assert port.servicer.calls == 0


def test_a_caller_without_a_key_learns_the_server_s_time_alone(port: Port) -> None:
    with port.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(PULL)(b"", timeout=5)
    shown = checks._time_in(error.value.details())
    assert abs((shown - now()).total_seconds()) < 5


def test_a_call_that_keeps_its_body_is_told_to_ask_again(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own word would be CANCELLED, by which an honest SuperNode leaves its loop."""
    channel, (call,), end = hold_open(port, signed(SITE), 1)
    until = time.monotonic() + 5
    while not port.open_calls.count():
        assert time.monotonic() < until
        time.sleep(0.01)
    monkeypatch.setattr(limits, "MAX_BODY_SECONDS", 0.0)
    port.open_calls.end_late()
    with pytest.raises(grpc.RpcError) as error:
        call.result(timeout=5)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "handshake" not in error.value.details()  # by that word it would leave its loop all the same
    end.set()
    channel.close()
    assert port.ask(signed(SITE)) == "OK"


@pytest.mark.parametrize(
    "method,size,status",
    [
        (PULL, limits.MAX_CALL_BYTES + 1, "PERMISSION_DENIED"), (PULL, 100, "INVALID_ARGUMENT"),
        ("/flwr.proto.Fleet/PushObject", limits.MAX_CALL_BYTES + 1, "INVALID_ARGUMENT"),
        ("/flwr.proto.Fleet/PushObject", limits.MAX_OBJECT_CALL_BYTES + 1, "RESOURCE_EXHAUSTED"),
        ("/flwr.proto.Fleet/Nothing", 1, "UNIMPLEMENTED"),
    ],
)  # fmt: skip
def test_a_body_is_as_long_as_its_call_needs(method: str, size: int, status: str, port: Port) -> None:
    assert port.ask(signed(SITE), b"\xff" * size, method) == status
    assert port.servicer.calls == 0


def test_a_bundle_is_compressed_on_its_way_and_a_part_of_a_message_is_not(port: Port) -> None:
    """With `per_message_decompression` off, gRPC hands over what came."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.per_message_decompression", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port.port}", options=options) as channel:
        bundle, part = (
            channel.unary_unary(f"/flwr.proto.Fleet/{name}")(bytes(60_000), metadata=signed(SITE), timeout=5)
            for name in ("GetFab", "PullObject")
        )
    assert len(part) == 60_000
    assert len(bundle) < 1_000
    assert gzip.decompress(bundle) == part


def test_an_empty_stream_is_no_call(port: Port) -> None:
    with port.channel() as channel:
        call = channel.stream_unary(PULL).future(iter(()), metadata=signed(SITE))
        with pytest.raises(grpc.RpcError) as error:
            call.result(timeout=5)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
