"""The reception: whose a reply is, what becomes of each message, and which errors end a run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedveil.errors import UnreachableError, WireError
from fedveil.server_app import reply_sources
from fedveil.server_app.object_reader import IncompleteReplyError, LostObjectError
from fedveil.server_app.reception import ArrivedReply, LostReply, Reception, RefusedReply
from fedveil.server_app.reply_content import ReplyContent, ReplyError
from fedveil.server_app.reply_sources import MessageGridSource, ReplyHead, RuntimePortSource, open_reply_source
from tests.conftest import ROOT

EAST, WEST, STRANGER = 11, 12, 13
NODES = {"east": EAST, "west": WEST}


def message_to(node: int) -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(RecordDict({"x": ConfigRecord()}), node, "train")


class FakeSource:
    """Gives what a test has laid into `heads`; the handle of a head is what reading it gives or raises."""

    def __init__(self, batch_size: int = 32) -> None:
        self.batch_size, self.heads, self.discarded = batch_size, list[ReplyHead](), list[str]()
        self.pulls: list[list[str]] = []
        self.not_taken: set[int] = set()

    def push_requests(self, messages: list[Message]) -> list[str]:
        nodes = [message.metadata.dst_node_id for message in messages]
        return ["" if node in self.not_taken else f"to {node}" for node in nodes]

    def pull_heads(self, message_ids: Sequence[str]) -> list[ReplyHead]:
        self.pulls.append(list(message_ids))
        came = [head for head in self.heads if head.reply_to in message_ids or not head.reply_to.startswith("to ")]
        self.heads = [head for head in self.heads if head not in came]
        return came

    def open_reader(self, head: ReplyHead, max_bytes: int, folder: Any) -> Any:
        def read() -> Any:
            if isinstance(head.handle, BaseException):
                raise head.handle
            return head.handle

        return SimpleNamespace(read_content=read, received_bytes=5)

    def discard_message(self, head: ReplyHead) -> None:
        self.discarded.append(head.message_id)

    def lay(self, handle: Any, reply_to: str = f"to {EAST}", node: int = EAST, is_error: bool = False) -> None:
        self.heads.append(ReplyHead(f"m{len(self.heads)}", reply_to, node, is_error, handle))


class Desk:
    """A reception that has asked two sites."""

    def __init__(self, source: Any) -> None:
        self.source, self.notes = source, list[dict]()
        self.reception = Reception(source, None, lambda about: self.notes.append(dict(about)))
        self.reception.ask({site: message_to(node) for site, node in NODES.items()}, 100)

    def poll(self, only: str = "") -> list[Any]:
        return list(self.reception.poll_replies(only))


@pytest.fixture
def desk() -> Desk:
    return Desk(FakeSource())


UPLOAD = ReplyContent(b"data", "")


@pytest.mark.parametrize(
    "handle,outcome",
    [
        (UPLOAD, ArrivedReply("east", b"data", "")),
        (ReplyError(2, "mine"), LostReply("east", 2, "mine")),
        (WireError("field: expected x"), RefusedReply("east", "field: expected x", 5)),
        (RecursionError("deep"), RefusedReply("east", "RecursionError", 5)),
        (MemoryError(), RefusedReply("east", "MemoryError", 5)),
        (LostObjectError("gone"), LostReply("east", 3, "gone")),
    ],
    ids=str,
)
def test_whatever_reading_a_reply_comes_to_is_its_site_s_one_outcome(desk, handle, outcome):
    desk.source.lay(handle)
    assert desk.poll() == [outcome]
    assert desk.source.discarded == ["m0"]
    desk.source.lay(UPLOAD)
    assert desk.poll() == []  # it is not asked for any more
    assert desk.reception.close_requests() == ["west"]


@pytest.mark.parametrize(
    "reply_to,node,is_error",
    [("", 1, False), ("", 1, True), ("x", EAST, False), (f"to {EAST}", WEST, False), (f"to {EAST}", STRANGER, True),
     (f"to {EAST}", 1, False)],
)  # fmt: skip
def test_a_message_that_answers_no_open_request_is_dropped(desk, reply_to, node, is_error):
    desk.source.lay(UPLOAD, reply_to, node, is_error)
    assert desk.poll() == []
    assert desk.source.discarded == ["m0"]
    assert desk.notes == [{"messages": 1, "node": str(node), "answers": reply_to}]
    assert desk.reception.close_requests() == ["east", "west"]


def test_an_error_of_the_superlink_counts_for_the_site_that_was_asked(desk):
    desk.source.lay(ReplyError(5, "gone"), node=1, is_error=True)
    assert desk.poll() == [LostReply("east", 5, "gone")]


def test_of_two_replies_to_one_request_the_second_is_dropped(desk):
    desk.source.lay(UPLOAD)
    desk.source.lay(WireError("no"))
    assert desk.poll() == [ArrivedReply("east", b"data", "")]
    assert [note["node"] for note in desk.notes] == [str(EAST)]


def test_a_dropped_message_with_the_number_of_an_open_request_does_not_remove_its_objects(desk):
    desk.source.heads.append(ReplyHead(f"to {WEST}", "", 1, False, UPLOAD))
    assert desk.poll() == []
    assert desk.source.discarded == []


def test_twenty_dropped_messages_have_a_line_each_and_the_others_a_count(desk):
    for _ in range(25):
        desk.source.lay(UPLOAD, "\x1b" + "x" * 1000)
    assert desk.poll() == []
    desk.reception.close()
    assert [note["messages"] for note in desk.notes] == [1] * 20 + [5]
    assert len(desk.notes[0]["answers"]) < 120
    assert "\x1b" not in desk.notes[0]["answers"]


def test_replies_are_read_in_the_order_of_the_requests_one_at_a_time(desk):
    desk.source.lay(UPLOAD, f"to {WEST}", WEST)
    desk.source.lay(UPLOAD)
    outcomes = desk.reception.poll_replies()
    assert next(outcomes).site == "east"
    assert desk.source.discarded == ["m1"]
    assert [outcome.site for outcome in outcomes] == ["west"]


def test_only_the_site_that_is_asked_for_is_polled(desk):
    desk.source.lay(UPLOAD)
    assert desk.poll("west") == []
    assert desk.source.pulls == [[f"to {WEST}"]]
    assert [outcome.site for outcome in desk.poll("east")] == ["east"]


def test_ids_are_asked_for_in_batches():
    source = FakeSource(2)
    reception = Reception(source, None, print)
    reception.ask({f"s{i}": message_to(i + 2) for i in range(5)}, 100)
    assert list(reception.poll_replies()) == []
    assert [len(pull) for pull in source.pulls] == [2, 2, 1]


def test_a_site_whose_message_was_not_taken_is_lost():
    source = FakeSource()
    source.not_taken = {WEST}
    desk = Desk(source)
    assert desk.poll() == [LostReply("west", 0, "the SuperLink did not accept the message to it")]
    assert desk.reception.close_requests() == ["east"]


def test_a_reply_that_is_not_whole_is_read_again_later_and_keeps_nobody_waiting(desk, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("fedveil.server_app.reception.time.monotonic", lambda: clock[0])
    desk.source.lay(IncompleteReplyError("not yet"))
    desk.source.lay(UPLOAD, f"to {WEST}", WEST)
    assert [outcome.site for outcome in desk.poll()] == ["west"]
    reads = list[float]()

    def read() -> None:
        reads.append(clock[0])
        raise IncompleteReplyError("not yet")

    desk.source.open_reader = lambda *_: SimpleNamespace(read_content=read, received_bytes=0)
    for _ in range(4000):
        clock[0] += 0.25
        assert desk.poll() == []
    assert [round(later - before, 2) for before, later in pairwise(reads)][:8] == [
        1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0
    ]  # fmt: skip
    assert desk.reception.close_requests() == ["east"]


def test_late_replies_are_taken_from_the_disk_and_count_for_nothing(desk):
    assert desk.reception.close_requests() == ["east", "west"]
    desk.source.lay(UPLOAD)
    assert desk.poll() == []
    desk.reception.close()
    assert desk.source.discarded == ["m0"]
    assert desk.notes == []


def test_a_close_that_fails_ends_nothing(desk, monkeypatch):
    def fail(message_ids: Sequence[str]) -> list[ReplyHead]:
        raise UnreachableError("gone")

    monkeypatch.setattr(desk.source, "pull_heads", fail)
    desk.reception.close()


@pytest.mark.parametrize("error", [UnreachableError("gone"), RunNotRunningException(), KeyboardInterrupt()])
def test_an_unreachable_superlink_and_a_stopped_run_end_it(desk, error):
    desk.source.lay(error)
    with pytest.raises(type(error)):
        desk.poll()


# A grid of messages


class MessageGrid:
    """A grid that gives these replies."""

    def __init__(self, replies: Any) -> None:
        self.replies = replies

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
        self.messages = messages
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: list[str]) -> Any:
        return [self.replies(message) for message in self.messages if message.metadata.message_id in message_ids]


def test_a_grid_that_fails_for_one_reply_costs_this_site_only():
    def reply(message: Message) -> Message:
        if message.metadata.dst_node_id == EAST:
            raise KeyError("inflated")
        return Message(Error(2, "mine"), reply_to=message)

    desk = Desk(MessageGridSource(MessageGrid(reply)))
    assert desk.poll() == [RefusedReply("east", "KeyError", 0), LostReply("west", 2, "mine")]


def test_a_message_of_a_grid_speaks_for_its_own_node_only():
    def reply_of_another(message: Message) -> Message:
        reply = Message(Error(2, "x"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = STRANGER
        return reply

    desk = Desk(MessageGridSource(MessageGrid(reply_of_another)))
    assert desk.poll() == []
    assert [note["node"] for note in desk.notes] == [str(STRANGER)] * 2


def test_a_grid_that_takes_fewer_messages_than_it_is_given_has_taken_none():
    grid = MessageGrid(None)
    grid.push_messages = lambda messages: ["one"]
    desk = Desk(MessageGridSource(grid))
    assert [outcome.site for outcome in desk.poll()] == ["east", "west"]


# The runtime port


def runtime_port(handle: Any) -> RuntimePortSource:
    """A source over Flower's own client, whose HTTP is answered by `handle(name, body)`: a response or a status."""

    def respond(request: httpx.Request) -> httpx.Response:
        answer = handle(request.url.path.rpartition("/")[2], request.read())
        if isinstance(answer, int):
            return httpx.Response(answer)
        return httpx.Response(200, content=answer.SerializeToString())

    client = RuntimeHttpClient("http://superlink")
    client._client = httpx.Client(transport=httpx.MockTransport(respond))
    run = SimpleNamespace(run_id=7)
    return RuntimePortSource(SimpleNamespace(_runtime_client=client, run=run))


@pytest.fixture
def no_waiting(monkeypatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(reply_sources.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reply_sources.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    return clock


def test_the_runtime_port_is_recognized_by_its_client():
    class Deployed:
        _runtime_client = None

    assert isinstance(open_reply_source(Deployed()), RuntimePortSource)
    assert isinstance(open_reply_source(MessageGrid(None)), MessageGridSource)


def test_a_port_that_gives_no_answer_for_two_minutes_ends_the_run(no_waiting):
    source = runtime_port(lambda name, body: 500)
    with pytest.raises(UnreachableError, match="has not answered for 120 s"):
        [source.pull_heads(["a"]) for _ in range(1000)]
    assert 120 < no_waiting[0] < 130


@pytest.mark.long
def test_an_id_that_fails_keeps_no_other_reply_back(no_waiting):
    def handle(name: str, body: bytes) -> Any:
        if name == "get-nodes":
            return runtime_pb2.GetNodesResponse()
        ids = runtime_pb2.PullAppMessagesRequest.FromString(body).message_ids
        if "bad" in ids:
            return 500
        messages = [message_pb2.Message(metadata={"message_id": f"m{id_}", "reply_to_message_id": id_}) for id_ in ids]
        return runtime_pb2.PullAppMessagesResponse(messages_list=messages)

    source = runtime_port(handle)
    for _ in range(100):
        no_waiting[0] += 10
        assert [head.reply_to for head in source.pull_heads(["a", "bad", "b"])] == ["a", "b"]
    for _ in range(100):  # its site is the last one: it does not end the run either
        no_waiting[0] += 10
        assert source.pull_heads(["bad"]) == []


def test_an_object_that_fails_three_times_is_the_reply_s_own_fault(no_waiting):
    asked: list[str] = []
    source = runtime_port(lambda name, body: asked.append(name) or 500)
    with pytest.raises(httpx.HTTPStatusError):
        source._pull_object("ab" * 32)
    assert asked == ["pull-object"] * 3


@pytest.mark.parametrize(
    "answer,error",
    [({}, LostObjectError), ({"object_found": True}, IncompleteReplyError)],
)
def test_an_object_that_is_not_there_has_its_own_error(answer, error):
    source = runtime_port(lambda name, body: message_pb2.PullObjectResponse(**answer))
    with pytest.raises(error):
        source._pull_object("ab" * 32)


def test_an_object_longer_than_any_is_refused_before_it_is_read():
    read: list[int] = []

    def respond(request: httpx.Request) -> httpx.Response:
        def body():
            read.append(1)
            yield b"x"

        length = {"content-length": str(reply_sources.MAX_OBJECT_RESPONSE_BYTES + 1)}
        return httpx.Response(200, headers=length, content=body())

    source = runtime_port(None)
    source._grid._runtime_client._client = httpx.Client(transport=httpx.MockTransport(respond))
    with pytest.raises(WireError, match="reply: an object has"):
        source._pull_object("ab" * 32)
    assert read == []


def test_a_message_that_cannot_be_confirmed_ends_nothing():
    runtime_port(lambda name, body: 500).discard_message(ReplyHead("a", "", 1, False, None))


def test_nobody_else_pushes_messages_or_pulls_replies():
    """The grid and its client, by the names of their methods, in the two apps and in all that they import."""
    names = {"push_messages", "pull_messages", "send_and_receive", "_runtime_client"}
    folders = (
        "server_app",
        "client_app",
        "strategies",
        *(f"fedveil/{name}" for name in ("federation", "records", "wire")),
    )
    users = {
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert users == {"server_app/reply_sources.py"}


def test_a_site_that_may_not_be_asked_is_lost_and_no_other():
    class Signer:
        def sign(self, site, message, contents):
            if site == "east":
                raise WireError("signature: the site is not registered: it is revoked")

    reception = Reception(FakeSource(), None, lambda about: None, Signer())
    reception.ask({site: message_to(node) for site, node in NODES.items()}, 100)
    (lost,) = reception.poll_replies()
    assert lost == LostReply("east", 0, "signature: the site is not registered: it is revoked")
    assert reception.close_requests() == ["west"]
