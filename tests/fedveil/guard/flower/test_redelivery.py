"""Messages of which a site never said that it has them, in Flower's own states of a SuperLink."""

from __future__ import annotations

import pytest
from flwr.supercore.date import now

from fedveil.guard.flower import redelivery
from tests.fedveil.guard.flower.states import STATES, Superlink

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's, of a new database


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own classes, changed as in a SuperLink, and put back."""
    for flowers in STATES:
        monkeypatch.setattr(flowers, "get_message_ins", flowers.get_message_ins)
    redelivery.patch_redelivery()


def handed_out(superlink: Superlink, site: int) -> list[int]:
    """What the site is told when it asks: the numbers of the messages."""
    messages = superlink.state.get_message_ins(node_id=superlink.nodes[site], limit=1)
    return [superlink.sent.index(message.metadata.message_id) for message in messages]


def received(superlink: Superlink, site: int) -> None:
    superlink.state.object_store.delete(superlink.sent[site])  # as the server does when the site says so


def test_flower_hands_a_message_out_once_whether_its_answer_came_or_not(superlink: Superlink) -> None:
    assert [handed_out(superlink, 0) for _ in range(2)] == [[0], []]


@pytest.mark.usefixtures("ours")
def test_a_message_is_handed_out_until_its_site_has_it_and_to_no_other(superlink: Superlink) -> None:
    assert [handed_out(superlink, 0) for _ in range(3)] == [[0]] * 3
    assert handed_out(superlink, 1) == [1]
    received(superlink, 0)
    assert handed_out(superlink, 0) == []
    assert handed_out(superlink, 1) == [1]


@pytest.mark.usefixtures("ours")
def test_a_message_that_is_answered_is_not_handed_out_again(superlink: Superlink) -> None:
    """As one that a SuperNode answers itself, without its parts."""
    assert handed_out(superlink, 0) == [0]
    session, parts = superlink.answer(0)
    for part in parts.items():
        superlink.take(session, *part)
    assert handed_out(superlink, 0) == []


@pytest.mark.long
@pytest.mark.usefixtures("ours")
def test_a_message_past_its_deadline_is_not_handed_out_again(
    superlink: Superlink, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handed_out(superlink, 0) == [0]
    later = type(now()).fromtimestamp(now().timestamp() + 200, now().tzinfo)
    for flowers in STATES:
        monkeypatch.setattr(f"{flowers.__module__}.now", lambda: later)
    assert handed_out(superlink, 0) == []


@pytest.mark.usefixtures("ours")
def test_the_older_of_two_comes_first(superlink: Superlink) -> None:
    assert handed_out(superlink, 0) == [0]
    second = superlink.send(0)
    assert [handed_out(superlink, 0) for _ in range(2)] == [[0]] * 2
    received(superlink, 0)
    assert handed_out(superlink, 0) == [second]
