"""A part pushed twice, in Flower's own stores, and over a connection that is cut while its answer is on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory

from fedveil.guard import duplicate_pushes

RUN = 7


class InMemory(InMemoryCoreState):
    """The part of Flower's state that stores objects, without its abstract rest."""


class Sql(SqlCoreState):
    """The same, of a server that keeps its state."""


for _state in (InMemory, Sql):
    _state.__abstractmethods__ = frozenset()


@pytest.fixture(params=["a dictionary", "SQL"])
def state(request: pytest.FixtureRequest) -> Any:
    if request.param == "a dictionary":
        return InMemory(ObjectStoreFactory().store())
    made = Sql(":memory:", ObjectStoreFactory().store())
    made.initialize()
    return made


def opened(state: Any) -> tuple[str, str, bytes]:
    """A session of one message: its name, and the name and content of a part."""
    with no_object_id_recompute():
        message = Message(RecordDict(), metadata=Metadata(RUN, "", 1, 2, "", "", now().timestamp(), 100.0, "train"))
        message.metadata.__dict__["_message_id"] = message.object_id
    session, tree = state.start_session(RUN), get_object_tree(message)
    assert tree.object_id in state.preregister_object_tree(tree, session)
    return session, tree.object_id, message.deflate()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own classes, changed as in a SuperLink or SuperNode, and put back."""
    for flowers in (InMemoryCoreState, SqlCoreState):
        monkeypatch.setattr(flowers, "store_object", flowers.store_object)
    duplicate_pushes.patch_duplicate_pushes()


def test_flower_refuses_a_repeated_push(state: Any) -> None:
    session, part, content = opened(state)
    assert state.store_object(RUN, session, part, content)
    assert not state.store_object(RUN, session, part, content)


@pytest.mark.usefixtures("ours")
def test_here_it_is_stored_once_and_said_twice(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[bytes] = []
    put = state.object_store.put
    monkeypatch.setattr(state.object_store, "put", lambda name, given: (puts.append(given), put(name, given)))
    session, part, content = opened(state)
    assert state.store_object(RUN, session, part, content)
    assert state.store_object(RUN, session, part, b"another")  # is not looked at: the first one is there
    assert puts == [content]
    assert state.get_object(RUN, part) == content


@pytest.mark.usefixtures("ours")
def test_who_does_not_know_the_session_learns_nothing(state: Any) -> None:
    session, part, content = opened(state)
    assert state.store_object(RUN, session, part, content)
    assert not state.store_object(RUN, "another", part, content)
    assert not state.store_object(RUN + 1, session, part, content)
    assert not state.store_object(RUN, session, "ab" * 32, content)
    assert not state.store_object(RUN, "", part, content)  # a SuperNode before sessions


class Store:
    """Stands for Flower's state: stores what it has not, `slow` waits in the middle of it."""

    def __init__(self, slow: Callable[[], None] = lambda: None, answers: bool = True) -> None:
        self.kept: list[tuple[int, str, str]] = []
        self.slow, self.answers = slow, answers

    def store_object(self, run_id: int, session_id: str, object_id: str, _content: bytes) -> bool:
        name = run_id, session_id, object_id
        if name in self.kept:
            return False
        self.kept.append(name)  # claimed, as Flower does before it stores
        self.slow()
        return self.answers


def test_a_push_while_the_first_is_being_stored_waits_for_it() -> None:
    stored, began = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert stored.wait(10)

    store, push, answers = Store(slow), duplicate_pushes.store_once(Store.store_object), list[bool]()
    threads = [
        threading.Thread(target=lambda: answers.append(push(store, RUN, "session", "part", b""))) for _ in range(2)
    ]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    time.sleep(0.05)
    assert answers == []
    stored.set()
    for thread in threads:
        thread.join(10)
    assert answers == [True, True]
    assert len(store.kept) == 1


def test_after_its_time_flower_answers_again() -> None:
    now_s = [0.0]
    store, push = Store(), duplicate_pushes.store_once(Store.store_object, clock=lambda: now_s[0])
    assert push(store, RUN, "session", "part", b"")
    now_s[0] = duplicate_pushes.SECONDS - 1
    assert push(store, RUN, "session", "part", b"")
    now_s[0] = duplicate_pushes.SECONDS
    assert not push(store, RUN, "session", "part", b"")


def test_it_is_forgotten_before_flower_forgets_the_session() -> None:
    assert duplicate_pushes.SECONDS < OBJECT_PUSH_SESSION_TTL_SECONDS


def test_no_more_than_the_most_are_remembered() -> None:
    store, push = Store(), duplicate_pushes.store_once(Store.store_object, most=2)
    for part in "abc":
        assert push(store, RUN, "session", part, b"")
    assert [push(store, RUN, "session", part, b"") for part in "cba"] == [True, True, False]


def test_what_was_not_stored_is_not_said_to_be() -> None:
    store, push = Store(answers=False), duplicate_pushes.store_once(Store.store_object)
    assert not push(store, RUN, "session", "part", b"")
    assert not push(store, RUN, "session", "part", b"")
