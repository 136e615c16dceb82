"""What a SuperNode asks again after, with Flower's own retry invoker of the line that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from flwr.proto import fleet_pb2, message_pb2
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException

from fedveil.guard import flower
from fedveil.guard.flower import retries

SPEAKS = flower.installed_release().speaks
PULL, PUSHES = fleet_pb2.PullMessagesRequest(), (fleet_pb2.PushMessagesRequest(), message_pb2.PushObjectRequest())
STATUSES = ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED")
STATUSES = STATUSES if SPEAKS == "gRPC" else ("408", "429", "500")
ENDED, TLS = ("PERMISSION_DENIED", "handshake") if SPEAKS == "gRPC" else ("403", "handshake")


def error(kind: str) -> Exception:
    """As the connection of this line raises it."""
    if SPEAKS == "HTTP":
        request = httpx.Request("POST", "https://localhost/v1/fleet/x")
        if kind == "handshake":
            return httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF", request=request)
        return httpx.HTTPStatusError(kind, request=request, response=httpx.Response(int(kind), request=request))
    import grpc

    class Answer(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode.UNAVAILABLE if kind == "handshake" else grpc.StatusCode[kind]

        def details(self) -> str:
            return "Ssl handshake failed: SSL_ERROR_SSL" if kind == "handshake" else "why"

    return Answer()


class Clock:
    """Time that passes while an invoker waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def invoker(clock: Clock, ours: bool = True) -> Any:
    if SPEAKS == "gRPC":
        from flwr.supercore.retry import make_simple_grpc_retry_invoker as make
    else:
        make = make_simple_http_retry_invoker
    made = make()

    def wait(seconds: float) -> None:
        clock.now += max(seconds, 1.0)
        if clock.now > 5000:
            raise TimeoutError("without end")

    made.wait_function = wait
    if ours:
        policy = retries.RetryPolicy(made, clock)
        made.invoke, made.should_giveup = policy.invoke, policy.should_give_up
    return made


def answers(*kinds: str) -> Callable[..., str]:
    left = list(kinds)

    def call(_request: Any) -> str:
        if left:
            raise error(left.pop(0))
        return "answer"

    return call


def always(kind: str) -> Callable[..., str]:
    def call(_request: Any) -> str:
        raise error(kind)

    return call


@pytest.mark.long
@pytest.mark.parametrize("status", STATUSES)
def test_an_answer_that_flower_gives_up_at_is_asked_again_after(status: str) -> None:
    assert invoker(Clock()).invoke(answers(status, status), PULL) == "answer"
    with pytest.raises(type(error(status)).__mro__[1]):
        invoker(Clock(), ours=False).invoke(answers(status), PULL)
    with pytest.raises(TimeoutError, match="without end"):
        invoker(Clock()).invoke(always(status), PULL)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("push", PUSHES, ids=lambda push: type(push).__name__)
def test_a_push_is_sent_again_for_five_minutes_at_most(status: str, push: Any) -> None:
    clock = Clock()
    made = invoker(clock)
    began = clock.now
    with pytest.raises(type(error(status)).__mro__[1]):
        made.invoke(always(status), push)
    assert retries.PUSH_SECONDS <= clock.now - began < retries.PUSH_SECONDS + 21
    assert made.invoke(answers(status, status), push) == "answer"  # the next one has its own five minutes


def test_a_handshake_that_fails_is_asked_again_after_once_a_call_has_succeeded() -> None:
    made = invoker(Clock())
    with pytest.raises(type(error(TLS)).__mro__[1]):
        made.invoke(answers(TLS), PULL)
    assert made.invoke(answers(), PULL) == "answer"
    assert made.invoke(answers(TLS, TLS, TLS), PULL) == "answer"
    assert made.invoke(answers(TLS, TLS), PUSHES[0]) == "answer"


def test_the_end_of_a_run_stays_one() -> None:
    with pytest.raises(RunNotRunningException):
        invoker(Clock()).invoke(answers(ENDED), PULL)


def test_what_is_not_an_answer_is_as_with_flower() -> None:
    unavailable = "UNAVAILABLE" if SPEAKS == "gRPC" else "503"
    assert invoker(Clock()).invoke(answers(unavailable), PULL) == "answer"
    with pytest.raises(ZeroDivisionError):
        invoker(Clock()).invoke(lambda _: 1 // 0, PULL)
    if SPEAKS == "HTTP":
        assert invoker(Clock()).invoke(answers("502"), PULL) == "answer"
