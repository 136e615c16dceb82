"""The thread between whole replies and Flower: fair, patient, and without an exception that ends it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.run import InvalidRunStatusException
from sqlalchemy.exc import OperationalError

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.hand_over import HandOver, WholeReply
from tests.fedveil.guard.fleet.replies import make_reply


class Flower:
    """Stands for Flower's two functions: asks for `objects` of each reply, and fails as `errors` say."""

    def __init__(self, objects: int = 2) -> None:
        self.objects = [f"{i:064x}" for i in range(objects)]
        self.errors: list[BaseException | None] = []
        self.calls: list[tuple[str, int]] = []
        self.stores = True

    def push_messages(self, request: Any) -> Any:
        self._call("announce", request.node.node_id)
        return SimpleNamespace(session_id="session", objects_to_push=self.objects)

    def push_object(self, request: Any) -> Any:
        assert request.session_id == "session"
        assert request.object_content == request.object_id.encode()
        self._call("object", request.node.node_id)
        return SimpleNamespace(stored=self.stores)

    def _call(self, name: str, node: int) -> None:
        self.calls.append((name, node))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def whole(node: int, ends: list[tuple[int, bool]], read: Any = str.encode) -> WholeReply:
    announcement = make_reply().announcement()
    object.__setattr__(announcement, "node_id", node)
    object.__setattr__(announcement, "request", _request(node))
    return WholeReply(announcement, read, lambda has_it: ends.append((node, has_it)))


def _request(node: int) -> bytes:
    request = make_reply().request
    request.node.node_id = node
    return request.SerializeToString()


def stepped(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> tuple[HandOver, Clock]:
    """Without its thread: the test does the steps."""
    clock = Clock()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    return HandOver(flower, monotonic=clock), clock


def run_out(hand_over: HandOver, clock: Clock, most: int = 1000) -> None:
    for _ in range(most):
        seconds = hand_over.step()
        if seconds == float("inf"):
            return
        clock.seconds += seconds
    raise AssertionError("it does not end")


def test_sites_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    flower, ends = Flower(objects=50), list[tuple[int, bool]]()
    hand_over, clock = stepped(flower, monkeypatch)
    hand_over.add_reply(whole(1, ends))
    hand_over.add_reply(whole(1, ends))
    flower.objects = flower.objects[:2]
    hand_over.add_reply(whole(2, ends))
    run_out(hand_over, clock)
    assert [node for _, node in flower.calls[:6]] == [1, 2, 1, 2, 1, 2]
    assert sorted(ends) == [(1, True), (1, True), (2, True)]
    assert hand_over.is_idle()


def test_a_locked_database_is_asked_again_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    flower, ends = Flower(), list[tuple[int, bool]]()
    flower.errors = [None, None, OperationalError("x", {}, Exception("locked"))]
    hand_over, clock = stepped(flower, monkeypatch)
    hand_over.add_reply(whole(1, ends))
    run_out(hand_over, clock)
    assert [name for name, _ in flower.calls] == ["announce", "object", "object", "announce", "object", "object"]
    assert ends == [(1, True)]
    assert clock.seconds > 0


@pytest.mark.parametrize("kind", ["raises", "does not store", "cannot be read"])
def test_after_ten_tries_a_reply_is_dropped_and_the_others_go_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flower, ends = Flower(), list[tuple[int, bool]]()
    hand_over, clock = stepped(flower, monkeypatch)

    def unreadable(_object_id: str) -> bytes:
        raise OSError("gone")

    if kind == "raises":
        flower.errors = [KeyError("x")] * limits.MAX_HAND_OVER_TRIES
    flower.stores = kind != "does not store"
    hand_over.add_reply(whole(1, ends, unreadable if kind == "cannot be read" else str.encode))
    run_out(hand_over, clock)
    flower.stores = True
    hand_over.add_reply(whole(2, ends))
    run_out(hand_over, clock)
    assert ends == [(1, False), (2, True)]
    assert sum(call == ("announce", 1) for call in flower.calls) == limits.MAX_HAND_OVER_TRIES


@pytest.mark.parametrize(
    "error",
    [InvalidRunStatusException("Run is finished."), FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, "x")],
    ids=["1.39", "1.42"],
)
def test_the_end_of_the_run_drops_a_reply_at_once(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is a BaseException: it would end the thread, and with it every site's replies."""
    flower, ends = Flower(), list[tuple[int, bool]]()
    flower.errors = [None, error]
    hand_over, clock = stepped(flower, monkeypatch)
    hand_over.add_reply(whole(1, ends))
    run_out(hand_over, clock)
    assert ends == [(1, False)]
    assert len(flower.calls) == 2


def test_a_reply_that_cannot_be_ended_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    flower, ends = Flower(), list[tuple[int, bool]]()
    hand_over, clock = stepped(flower, monkeypatch)
    first = whole(1, ends)
    first.finish = lambda has_it: 1 / 0  # type: ignore[assignment,return-value]
    hand_over.add_reply(first)
    hand_over.add_reply(whole(1, ends))
    run_out(hand_over, clock)
    assert ends == [(1, True)]


def test_the_thread_does_it_by_itself_and_once() -> None:
    flower, done = Flower(), threading.Event()
    hand_over = HandOver(flower)
    reply = whole(1, [])
    reply.finish = lambda has_it: done.set()
    hand_over.add_reply(reply)
    assert done.wait(10)
    again = threading.Event()
    second = whole(1, [])
    second.finish = lambda has_it: again.set()
    hand_over.add_reply(second)
    assert again.wait(10)
    assert len(flower.calls) == 6
