"""Replies whose parts have not all come, in Flower's own states of a SuperLink."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.date import now

from fedveil.guard.flower import incomplete_replies
from tests.fedveil.guard.flower.states import STATES, Superlink

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's, of a new database
ABOVE = "ab" * 32


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own classes, changed as in a SuperLink, and put back."""
    for flowers in STATES:
        for name in ("store_message_and_object_tree", "get_message_res"):
            monkeypatch.setattr(flowers, name, getattr(flowers, name))
    incomplete_replies.patch_incomplete_replies()


@pytest.mark.parametrize("above", ["", ABOVE])
def test_flower_hands_out_a_reply_of_which_nothing_has_come(superlink: Superlink, above: str) -> None:
    superlink.answer(0, above=above)
    assert superlink.found(0, 1) == [0]


@pytest.mark.long
@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("order", [1, -1])
def test_a_reply_is_there_once_all_of_it_is_and_holds_up_no_other(superlink: Superlink, order: int) -> None:
    stalled, parts = superlink.answer(0)
    assert superlink.found(0, 1) == []
    *some, last = list(parts.items())[::order]  # the reply itself comes last, or first
    for part in some:
        superlink.take(stalled, *part)
    other, all_parts = superlink.answer(1)
    for part in all_parts.items():
        superlink.take(other, *part)
    assert superlink.found(0, 1) == [1]
    assert superlink.found(0) == []
    superlink.take(stalled, *last)
    assert superlink.found(0) == [0]
    assert superlink.found(0) == []  # once


@pytest.mark.usefixtures("ours")
def test_a_whole_reply_that_is_announced_again_is_there(superlink: Superlink) -> None:
    """As by a site whose connection ended before it had heard that the first was taken."""
    reply = superlink.reply(0)
    session, parts = superlink.answer(0, reply)
    for part in parts.items():
        superlink.take(session, *part)
    assert superlink.answer(0, reply)[1] == {}
    assert superlink.found(0) == [0]


@pytest.mark.usefixtures("ours")
def test_of_a_site_without_a_sign_of_life_the_server_learns_so(
    superlink: Superlink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not only after the three minutes in which a part might come."""
    superlink.answer(0)
    later = now().timestamp() + 100
    for module in (in_memory_linkstate, sql_linkstate):
        monkeypatch.setattr(module, "now", lambda: type(now()).fromtimestamp(later, now().tzinfo))
    monkeypatch.setattr("flwr.supercore.date.now", lambda: type(now()).fromtimestamp(later, now().tzinfo))
    assert superlink.found(0) == [-1]


@pytest.mark.usefixtures("ours")
def test_a_reply_whose_parts_nobody_sends_any_more_is_lost(
    superlink: Superlink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (in_memory_corestate, sql_corestate):
        monkeypatch.setattr(module, "OBJECT_PUSH_SESSION_TTL_SECONDS", 0)
    superlink.answer(0)
    assert superlink.found(0) == [-1]


@pytest.mark.usefixtures("ours")
def test_a_reply_that_is_announced_below_another_object_holds_up_nobody(superlink: Superlink) -> None:
    """Its session is the other object's, so that no session says that parts of it are missing."""
    superlink.answer(0, above=ABOVE)
    session, parts = superlink.answer(1)
    for part in parts.items():
        superlink.take(session, *part)
    assert superlink.found(0, 1) == [-1, 1]


@pytest.mark.usefixtures("ours")
def test_an_announcement_without_the_reply_itself_holds_up_nobody(superlink: Superlink) -> None:
    reply, session = superlink.reply(0), superlink.state.start_session(superlink.run)
    superlink.state.store_message_and_object_tree(reply, ObjectTree(object_id=ABOVE), session)
    assert superlink.found(0) == [-1]


def test_nothing_is_announced_while_replies_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reply that comes between the look at its parts and Flower's own is handed out without them."""
    superlink, announced = Superlink(), threading.Event()
    for name in ("store_message_and_object_tree", "get_message_res"):
        monkeypatch.setattr(STATES[0], name, getattr(STATES[0], name))
    thread = threading.Thread(target=lambda: (superlink.answer(0), announced.set()))

    def looks(state: Any, message_ids: set[str]) -> list[tuple[str, str, bool]]:
        thread.start()
        assert not announced.wait(0.5)
        return []

    incomplete_replies._only_whole(STATES[0], looks)
    assert superlink.found(0) == []
    thread.join(10)
    assert announced.is_set()
