"""Both ends with Flower's own messages, and no process: what goes in at one comes out at the other, or is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run, RunNotRunningException

from fedveil.errors import StateError
from fedveil.guard import reply_check as replies
from fedveil.records import audit_log
from fedveil.relay import status_events
from fedveil.relay.keys import EndpointSecret
from fedveil.relay.message_body import RelayReply as Answer
from fedveil.relay.message_body import RelayRequest
from fedveil.relay.sealed_message import ORDER, REPLY, encrypt_message
from fedveil.relay.server_endpoint import ServerEndpoint
from fedveil.relay.site_endpoint import SiteEndpoint, reply_of
from fedveil.wire import chunking
from tests.fedveil.relay.two import SERVER, SITE, STRANGER, Two, two

RUN, NODE = 7, 1 << 63
HEAD = f"3:{'0f' * 32}"
BUNDLE = Fab("ab" * 32, b"a bundle", {})


def message(kind: str = "train", seconds: float = 3600.0, size: int = 1000, run: int = RUN) -> Message:
    """As a server's app sends it, with its number."""
    rng = np.random.default_rng(1)
    part = rng.bytes(size)
    content = RecordDict({
        "fedveil": ArrayRecord({chunking.slice_key(0): Array("uint8", (size,), chunking.STYPE, part)}),
        "order": ConfigRecord({"round": 3, "is-new": True, "site": "north", "seconds": 0.1 + 0.2, "text": "ü\n"}),
        "config": ConfigRecord(),
    })  # fmt: skip
    about = Metadata(run, "", 1, NODE, "", "3", time.time(), seconds, kind)
    made = Message(content=content, metadata=about)
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


@dataclass
class Server:
    """A SuperLink as one end sees it: messages to be fetched, and what was sent."""

    two: Two
    clock: Callable[[], float] = time.time
    messages: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    running: bool = True

    def __post_init__(self) -> None:
        self.end = ServerEndpoint(self.two.server, self.clock)

    def look(self) -> None:
        """What Flower's loop does, twice: letters are judged at the second look."""
        for _ in range(2):
            if self.end.look(receive=self._receive, get_run=self._run, get_fab=lambda *_: BUNDLE,
                             pull_object=lambda _run, i: self._objects[i],
                             confirm_message_received=lambda *_: None) is not None:  # fmt: skip
                self.end.push(send=self._send, push_object=self._push)

    def _receive(self) -> Any:
        if not self.messages:
            return None
        now = self.messages.pop(0)
        self._objects = {i: part.deflate() for i, part in get_all_nested_objects(now).items()}
        return remove_content_from_message(now), get_object_tree(now)

    def _run(self, run: int) -> Run:
        return dataclasses.replace(Run.create_empty(run), fab_hash=BUNDLE.hash_str, override_config={"run.seed": 4})

    def _send(self, bare: Message, tree: Any, _seconds: float) -> tuple[set[str], str]:
        if not self.running:
            raise RunNotRunningException
        self._tree, self._contents = tree, {}
        self._left = set(_ids(tree))
        return set(self._left), "session"

    def _push(self, run: int, session: str, object_id: str, content: bytes) -> None:
        assert (run, session) == (RUN, "session")
        self._contents[object_id] = content
        if set(self._contents) == self._left:
            whole_message = inflate_object_from_contents(self._tree.object_id, dict(self._contents))
            assert isinstance(whole_message, Message)
            self.sent.append(whole_message)

    def said(self) -> list[str]:
        return [words for _, words in status_events.read_events(self.two.server.state / status_events.NAME, 0)[0]]

    def orders(self) -> list[Path]:
        return sorted(self.two.server.orders.iterdir())


def _ids(tree: Any) -> list[str]:
    return [tree.object_id, *(i for child in tree.children for i in _ids(child))]


class Site:
    """A SuperNode's loop at the other end."""

    def __init__(self, both: Two, clock: Callable[[], float] = time.time) -> None:
        self.two, self.end, self.stack = both, SiteEndpoint(both.site, clock), ExitStack()
        self.calls: tuple[Any, ...] = ()

    def take(self) -> Message | None:
        """The next message, whole, as a client process gets it."""
        if not self.calls:
            self.calls = self.stack.enter_context(self.end.connection(transport="grpc-rere", server_address="nowhere"))
        receive, _, _, _, pull = self.calls[1:6]
        message_and_tree = next(
            (message_and_tree for message_and_tree in (receive() for _ in range(3)) if message_and_tree), None
        )
        if message_and_tree is None:
            return None
        bare, tree = message_and_tree
        contents = {i: pull(bare.metadata.run_id, i) for i in set(_ids(tree))}
        whole = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(whole, Message)
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole

    def answer(self, reply: Message) -> None:
        """As Flower's SuperNode sends it."""
        send, push = self.calls[2], self.calls[6]
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts, session = send(remove_content_from_message(reply), get_object_tree(reply), 2.5)
        for object_id, part in get_all_nested_objects(reply).items():
            if object_id in parts:
                push(reply.metadata.run_id, session, object_id, part.deflate())

    def refused(self) -> list[str]:
        """What is said of what was refused."""
        return [
            w
            for what, w in status_events.read_events(self.two.site.state / status_events.NAME, 0)[0]
            if what == "refused"
        ]

    def again(self, clock: Callable[[], float] = time.time) -> Site:
        """After the process has ended."""
        self.stack.close()
        self.end._book.release()
        return Site(self.two, clock)


def upload(to: Message, size: int = chunking.SLICE_BYTES + 5, signature: dict | None = None) -> Message:
    """What the guard sends."""
    slices = list(chunking.slice_message([np.random.default_rng(2).bytes(size)]))
    return replies.check_upload_reply(slices, HEAD, to, signature)


@pytest.fixture
def both(tmp_path) -> Two:
    return two(tmp_path)


def exported(both: Two, *messages: Message) -> Server:
    server = Server(both, messages=[*messages])
    for _ in messages:
        server.look()
    both.carry()
    return server


def records(content: RecordDict) -> str:
    return content.object_id  # a hash of all that is in it


@pytest.mark.parametrize("signature", [None, {"version": 1, "key": "0a" * 8, "signature": "0b" * 64}])
def test_message_and_upload_are_those_of_the_wire_bit_for_bit(both, signature):
    asked = message()
    server, site = exported(both, asked), Site(both)
    taken = site.take()
    assert taken is not None
    assert taken.metadata == asked.metadata
    assert records(taken.content) == records(asked.content)
    assert taken.object_id == asked.object_id
    run, fab = site.calls[3](RUN), site.calls[4](BUNDLE.hash_str, RUN)
    assert (run, fab) == (server._run(RUN), BUNDLE)
    assert site.calls[0] == NODE
    site.answer(reply := upload(taken, signature=signature))
    both.carry()
    server.look()
    (sent,) = server.sent
    assert records(sent.content) == records(reply.content)
    assert sent.metadata.reply_to_message_id == asked.object_id
    assert (sent.metadata.src_node_id, sent.metadata.dst_node_id) == (NODE, 1)
    assert server.orders() == []
    assert [line["event"] for line in audit_log.read_log(both.site.state / "relay-log.jsonl")] == ["taken", "answered"]
    assert [line["event"] for line in audit_log.read_log(both.server.state / "relay-log.jsonl")] == [
        "exported",
        "imported",
    ]


def test_neither_way_shows_a_byte_to_who_carries_it(both):
    asked = message(size=5000)
    exported(both, asked)
    site = Site(both)
    taken = site.take()
    assert taken is not None
    site.answer(reply := upload(taken, 6000))
    (order,), (answer,) = both.server.orders.iterdir(), both.site.replies.iterdir()
    for file, record in ((order, asked), (answer, reply)):
        part = record.content.array_records["fedveil"][chunking.slice_key(0)].data
        data = file.read_bytes()
        assert not any(part[at : at + 8] in data for at in range(0, 5000, 500))
        assert b"north" not in data
        assert HEAD.encode() not in data


def test_a_refusal_comes_with_its_words(both):
    server, site = exported(both, message()), Site(both)
    taken = site.take()
    assert taken is not None
    words = "PolicyError: " + "no " * 500
    site.answer(Message(Error(2, words), reply_to=taken))
    both.carry()
    server.look()
    assert (server.sent[0].error.code, server.sent[0].error.reason) == (2, words)


@pytest.mark.parametrize("kind", [*TaskType, ""])
def test_an_order_of_a_run_that_is_no_serverapps_is_refused_and_logged(both, monkeypatch, kind):
    run = Server._run
    monkeypatch.setattr(Server, "_run", lambda *given: dataclasses.replace(run(*given), primary_task_type=str(kind)))
    exported(both, message())
    site = Site(both)
    taken = site.end._next() or site.end._next()  # judged at the second look
    if kind in ("", "flwr-serverapp"):
        assert taken is not None
        return
    assert taken is None
    (words,) = site.refused()
    assert f"only ServerApp runs (flwr-serverapp) are accepted, but this one has type {kind}" in words
    assert [line["event"] for line in audit_log.read_log(both.site.state / "relay-log.jsonl")] == ["refused"]


def test_an_answered_order_is_not_taken_again_and_a_second_reply_is_not_sent(both):
    server, site = exported(both, message()), Site(both)
    taken = site.take()
    assert taken is not None
    site.answer(upload(taken))
    both.carry()
    for number in range(3):  # copied under other names, and before another process
        (order,) = [f for f in both.site.orders.iterdir() if f.name.startswith("order")]
        (both.site.orders / f"again{number}.relay").write_bytes(order.read_bytes())
    site = site.again()
    assert [site.end._next() for _ in range(3)] == [None] * 3
    server.look()
    for file in both.site.replies.iterdir():
        (both.server.replies / f"again-{file.name}").write_bytes(file.read_bytes())
    server.look()
    assert len(server.sent) == 1
    assert "again-" in server.said()[-1]
    assert "was already accepted" in server.said()[-1]
    assert len(Server(both).end._answered) == 1  # also after a start


def test_a_process_that_ended_in_mid_order_takes_it_again(both):
    exported(both, message())
    site = Site(both)
    assert site.take() is not None
    again = site.again().take()
    assert again is not None
    assert [line["event"] for line in audit_log.read_log(both.site.state / "relay-log.jsonl")] == ["taken", "taken"]


def test_orders_come_in_turn_and_one_from_before_another_is_refused(both):
    first, second = message(), message(seconds=3700.0)
    exported(both, first, second)
    site = Site(both)
    names = sorted(file.name for file in both.site.orders.iterdir())
    (both.site.orders / names[0]).rename(both.site.orders / "z.relay")  # names are anybody's
    taken = site.take()
    assert taken is not None
    assert taken.object_id == second.object_id
    site.answer(upload(taken))
    assert site.take() is None
    assert "z.relay: older: the site has already accepted a newer order" in site.refused()[-1]


def test_an_order_that_ended_is_refused_by_the_sites_clock_and_taken_back_by_the_servers(both):
    server = exported(both, message(seconds=100.0))
    site = Site(both, clock=lambda: time.time() + 7300)
    assert [site.end._next() for _ in range(2)] == [None, None]
    assert "which expired 2.0 h ago by this machine's clock" in site.refused()[0]
    late = site.again()
    taken = late.take()
    assert taken is not None
    late.answer(upload(taken))
    server.end._clock = lambda: time.time() + 101
    both.carry()
    server.look()
    assert server.orders() == []
    assert server.sent == []
    assert "it has expired" in " ".join(server.said())
    assert "it answers no open order" in server.said()[-1]


def test_secure_aggregation_is_refused_at_once_for_nobody_waits_so_long(both):
    server = exported(both, message("query.secure"))
    assert server.orders() == []
    words = "PolicyError: this site is behind a relay; secure aggregation waits for 120 s: leave this site out of "
    assert server.sent[0].error.reason == f"{words}such a run"


def test_an_order_above_the_bound_is_refused_and_a_reply_above_it_is_not_opened(tmp_path):
    both = two(tmp_path, most_bytes=100_000)
    server = exported(both, message(size=200_000), message())
    assert "exceeds its limit of 100,000" in server.sent[0].error.reason
    assert len(server.orders()) == 1
    (both.server.replies / "large.relay").write_bytes(bytes(100_001))
    server.look()
    assert "it has 100,001 bytes; at most 100,000 are allowed" in server.said()[-1]


def test_an_end_that_starts_anew_takes_back_what_nobody_waits_for_and_no_other_file(both):
    exported(both, message())
    (both.server.orders / "notes.txt").touch()
    server = Server(both)
    assert [file.name for file in server.orders()] == ["notes.txt"]
    assert "the relay has ended in the meantime" in server.said()[-1]


def test_a_folder_in_the_place_of_an_order_stops_neither_the_end_nor_the_next_start(both):
    server = exported(both, message())
    order = server.orders()[0]
    order.unlink()
    order.mkdir()  # by who carries the letters
    server.end.end()
    again = Server(both)
    again.messages.append(message())
    again.look()
    assert len(again.orders()) == 2


def test_an_end_that_ends_takes_its_orders_back(both):
    server = exported(both, message())
    server.end.end()
    assert server.orders() == []


def test_a_reply_to_a_run_that_has_ended_is_said_and_the_next_one_goes_on(both):
    server, site = exported(both, message()), Site(both)
    server.running = False
    taken = site.take()
    assert taken is not None
    site.answer(upload(taken))
    both.carry()
    server.look()
    assert "was lost, perhaps because the run has ended" in server.said()[-1]
    ended = message()
    server.messages, server._run = [ended], _not_running  # type: ignore[method-assign]
    server.look()
    assert server.said()[-1].startswith("a message was lost")
    del server._run
    server.running, server.messages = True, [message(seconds=50.0)]
    server.look()
    both.carry()
    taken = site.take()
    assert taken is not None
    site.answer(upload(taken))
    both.carry()
    server.look()
    assert len(server.sent) == 1


def _not_running(_run: int) -> Run:
    raise RunNotRunningException


def letter(
    both: Two, folder: Path, name: str, content: list[bytes], kind: str, own: EndpointSecret, peer: EndpointSecret
) -> None:
    """A letter by hand, from whom one likes."""
    (folder / name).write_bytes(b"".join(map(bytes, encrypt_message(content, kind, name[:32], own, peer.public))))


def test_another_sites_reply_is_refused(both):
    server = exported(both, message())
    (id_,) = server.end._open
    reply = Answer(id_, 0, "", HEAD, "", 1.0, b"x").packed()
    letter(both, both.server.replies, f"{id_}.relay", reply, REPLY, STRANGER, SERVER)
    server.look()
    assert "sender: expected" in server.said()[-1]
    letter(both, both.server.replies, f"{'ab' * 16}.relay", reply, REPLY, SITE, SERVER)
    server.look()
    assert "it answers no open order" in server.said()[-1]  # of another letter's number
    assert server.sent == []
    letter(both, both.server.replies, f"{id_}.relay", reply, REPLY, SITE, SERVER)
    server.look()
    assert len(server.sent) == 1


@pytest.mark.parametrize(
    "change,said",
    [
        ({"message": b"\xff\xff"}, "Flower's message, run and bundle cannot be read"),
        ({"run": b"\xff\xff"}, "Flower's message, run and bundle cannot be read"),
        ({"bundle": b"\xff\xff"}, "Flower's message, run and bundle cannot be read"),
        ({"run": b""}, "do not match each other"),
        ({"node": 5}, "do not match each other"),
    ],
    ids=["message", "run", "bundle", "another run", "another node"],
)
def test_an_order_of_other_parts_is_refused(both, change, said):
    server = exported(both, message())
    (id_,) = server.end._open
    order = dataclasses.replace(server.end._order(message(), server._run(RUN), BUNDLE), **change)
    for file in both.site.orders.iterdir():
        file.unlink()
    letter(both, both.site.orders, f"{id_}.relay", order.packed(), ORDER, SERVER, SITE)
    site = Site(both)
    assert [site.end._next() for _ in range(2)] == [None, None]
    assert said in site.refused()[0]


def test_orders_for_another_node_wait_for_a_new_start(both):
    server = exported(both, message())
    site = Site(both)
    assert site.take() is not None
    other = message(seconds=99.0)
    other.metadata.__dict__["_dst_node_id"] = 5
    order = server.end._order(other, server._run(RUN), BUNDLE)
    assert isinstance(order, RelayRequest)
    letter(both, both.site.orders, f"{'cd' * 16}.relay", order.packed(), ORDER, SERVER, SITE)
    assert site.take() is None
    assert "the site has a new node key; start fedveil relay import again" in site.refused()[-1]


def test_a_reply_that_cannot_be_written_is_said_and_the_order_is_not_answered(both, monkeypatch):
    exported(both, message())
    site = Site(both)
    taken = site.take()
    assert taken is not None
    monkeypatch.setattr("fedveil.relay.site_endpoint.write_atomic", _full)
    with pytest.raises(StateError, match="the reply cannot be written"):
        site.answer(upload(taken))
    monkeypatch.undo()
    lines = status_events.read_events(both.site.state / status_events.NAME, 0)[0]
    assert [what for what, _ in lines][-1] == "failed"
    again = site.again()
    taken = again.take()
    assert taken is not None
    again.answer(upload(taken))
    assert len(list(both.site.replies.iterdir())) == 1


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_is_gone_is_said_once_and_waited_for(both):
    site = Site(both)
    both.site.orders.rename(both.site.orders.with_name("pulled-out"))
    assert [site.end._next() for _ in range(3)] == [None] * 3
    lines = status_events.read_events(both.site.state / status_events.NAME, 0)[0]
    assert [what for what, _ in lines] == ["waiting", status_events.IDLE]
    both.site.orders.with_name("pulled-out").rename(both.site.orders)
    server = exported(both, message())
    assert site.take() is not None
    both.server.replies.rmdir()
    server.look()
    server.look()
    assert sum("the folder for exchanged files cannot be read" in words for words in server.said()) == 1


def test_of_a_bundles_message_nothing_else_is_written(both):
    """What the guard refuses on the wire has no way here either."""
    from fedveil.errors import PolicyError

    exported(both, message())
    taken = Site(both).take()
    assert taken is not None
    extra = upload(taken)
    extra.content["more"] = ConfigRecord({"row": "a name"})
    with pytest.raises(PolicyError, match="it must contain the record fedveil and no other"):
        reply_of(extra, "ab" * 16, 1.0)


def test_what_is_said_is_text_on_one_line(both):
    Server(both).end._said.say("refused", "a\x1b[2J\n" + "x" * 5000)
    ((_, words),), _ = status_events.read_events(both.server.state / status_events.NAME, 0)
    assert "\x1b" not in words
    assert len(words) < 1100
    assert json.loads((both.server.state / status_events.NAME).read_text())["what"] == "refused"
