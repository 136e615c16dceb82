"""Messages of a lying server that would end a SuperNode: refused, confirmed and answered, through Flower's own loop."""

from __future__ import annotations

import dataclasses
import logging
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flwr.supernode.start_client_internal as flowers
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.logger import LOGGER_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate import NodeStateFactory

from fedveil.errors import WireError
from fedveil.guard import message_intake, supernode
from fedveil.guard.message_intake import EXTRA_BYTES, MessageLimit, read_limit
from tests.conftest import ROOT
from tests.fedveil.guard.fleet.replies import object_bytes, object_id
from tests.fedveil.guard.test_received_bundle import bundle
from tests.fedveil.guard.test_received_tree import count_nodes

RUN = 7
PYPROJECT = (ROOT / "pyproject.toml").read_bytes()
PART = 1_000_000


def message_of(content: RecordDict) -> Message:
    metadata = Metadata(RUN, "", 1, 2, "", "", now().timestamp(), 100.0, "train")
    with no_object_id_recompute():
        message = Message(content=content, metadata=metadata)
        message.metadata.__dict__["_message_id"] = message.object_id
    return message


def large(parts: int) -> Message:
    """Some megabytes in records of one."""
    return message_of(RecordDict({str(i): ConfigRecord({"x": bytes([i]) * PART}) for i in range(parts)}))


LEVELS = [object_bytes("ConfigRecord", [], str(level).encode()) for level in range(13)]


def doubled(message: Message) -> ObjectTree:
    """The message's tree, to which a tree of true objects is added that doubles at each level."""
    ids = [object_id(content) for content in LEVELS]
    tree = get_object_tree(message)
    tree.children.append(ObjectTree(object_id=ids[0]))
    for above, below in zip(ids[1:], ids, strict=False):
        tree.children.append(ObjectTree(object_id=above, children=[ObjectTree(object_id=below)] * 2))
    return tree


@dataclass
class Server:
    """A SuperNode's state, and the calls of a server that lies."""

    message: Message
    policy: str = ""
    tree: ObjectTree | None = None
    fab: bytes = field(default_factory=lambda: bundle(("pyproject.toml", PYPROJECT)))
    confirmed: list[str] = field(default_factory=list)
    sent: list[tuple[str, str]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    pulled: int = 0
    fails_to_pull: Exception | None = None
    fails_to_tell_the_run: Exception | None = None
    hash_str: str = ""
    fails_to_confirm: type[BaseException] | None = None

    def __post_init__(self) -> None:
        stores = ObjectStoreFactory()
        self.store, self.state = stores.store(), NodeStateFactory(stores).state()
        self.state.set_node_id(2)
        self.slept: list[float] = []
        errors = supernode.LoopErrors(self.slept.append)
        self.look = supernode.pull_message(flowers._pull_and_store_message, errors)
        self.push = supernode.push_reply(flowers._push_messages, errors)
        with no_object_id_recompute():
            self.objects = {i: o.deflate() for i, o in get_all_nested_objects(self.message).items()}
        self.waiting = [(self.message, self.tree or get_object_tree(self.message))]

    def step(self, look: Any = None) -> int | None:
        """One step of Flower's loop: pull, and send what waits."""
        run: int | None = (look or self.look)(
            state=self.state, object_store=self.store, node_config={"policy": self.policy} if self.policy else {},
            receive=lambda: self.waiting.pop() if self.waiting else None,
            get_run=self._get_run, pull_object=self._pull,
            get_fab=lambda *_: Fab(self.hash_str or object_id(self.fab), self.fab, {}),
            confirm_message_received=self._confirm, trusted_entities=None,
        )  # fmt: skip
        return run

    def _get_run(self, run: int) -> Run:
        if self.fails_to_tell_the_run is not None:
            raise self.fails_to_tell_the_run
        self.asked.append(run)
        return dataclasses.replace(Run.create_empty(run), fab_hash=object_id(self.fab), series_id=run)

    def _pull(self, _run: int, object_id: str) -> bytes:
        if self.fails_to_pull is not None:
            raise self.fails_to_pull
        content = self.objects[object_id]
        self.pulled += len(content)
        return content

    def _confirm(self, _run: int, message_id: str) -> None:
        if self.fails_to_confirm is not None:
            raise self.fails_to_confirm
        self.confirmed.append(message_id)

    def send(self) -> None:
        def send(message: Message, tree: ObjectTree, _seconds: float) -> tuple[set[str], str]:
            assert message.has_error()
            assert count_nodes(tree) == 1
            self.sent.append((message.metadata.reply_to_message_id, message.error.reason))
            return {tree.object_id}, "session"

        self.push(state=self.state, object_store=self.store, send=send, push_object=lambda *_: None)

    def kept(self) -> tuple[list[int], int, list[int]]:
        """The runs, the number of bundles, and the series of the contexts that the SuperNode keeps."""
        state = self.state
        return [*state.run_store], len(state.fab_store), [*state.run_series_context_store]

    def require_refused(self, words: str) -> None:
        """The message is confirmed and answered, nothing of it stays, and the loop goes on without a pause."""
        assert self.step() == RUN
        self.send()
        ((answered, reason),) = self.sent
        assert (answered, self.slept) == (self.message.object_id, [])
        assert words in reason
        assert len(self.store) == 0
        assert len(self.state.msg_store) == 0
        assert self.kept() == ([], 0, [])
        assert not [task for task in self.state.get_tasks(run_ids=[RUN]) if task.status.status == "pending"]
        assert self.step() is None


def policy(folder: Path, text: str) -> str:
    file = folder / "site-policy.toml"
    file.write_text(text)
    return str(file)


def test_an_honest_message_is_as_with_flower(tmp_path: Path) -> None:
    for rule in ("", policy(tmp_path, "max-bytes-a-round = 1")):
        for look in (None, flowers._pull_and_store_message):
            server = Server(large(3), rule)
            assert server.step(look) == RUN
            assert server.confirmed == [server.message.object_id]
            assert len(server.store) == 5
            assert [task.status.status for task in server.state.get_tasks(run_ids=[RUN])] == ["pending"]


def test_a_tree_that_expands_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    message = large(1)
    server = Server(message, tree=doubled(message))
    logging.getLogger(LOGGER_NAME).addHandler(caplog.handler)
    server.require_refused("names a child twice")
    logging.getLogger(LOGGER_NAME).removeHandler(caplog.handler)
    assert server.confirmed == [message.object_id]
    assert server.pulled == 0
    assert f"refused the server's message {message.object_id} of run {RUN}" in caplog.text


def test_flowers_own_loop_takes_that_tree_and_a_client_process_is_given_what_became_of_it() -> None:
    message = large(1)
    server = Server(message, tree=doubled(message))
    server.objects |= {object_id(content): content for content in LEVELS}
    assert server.step(flowers._pull_and_store_message) == RUN
    assert server.confirmed == [message.object_id]
    assert count_nodes(server.store.get_object_tree(message.object_id)) > 2 ** len(LEVELS)
    assert count_nodes(doubled(message)) < 50


def test_a_bundle_that_inflates_is_refused() -> None:
    server = Server(large(1), fab=bundle(("pyproject.toml", PYPROJECT + b"\n" * (1 << 20))))
    server.require_refused("pyproject.toml has more than")
    assert server.confirmed == [server.message.object_id]
    assert server.state.get_run(RUN) is None


def test_more_bytes_than_the_policy_permits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_intake, "EXTRA_BYTES", extra := 2 * PART)
    server = Server(large(4), policy(tmp_path, "max-bytes-a-round = 1000"))
    server.require_refused(f"more than {extra + 1000} bytes: max-bytes-a-round is 1000")
    assert server.confirmed == [server.message.object_id]
    assert extra + 1000 < server.pulled < 4 * PART + 2000
    fits = Server(large(4), policy(tmp_path, f"max-bytes-a-round = {2 * PART + 2000}"))
    assert fits.step() == RUN
    assert len(fits.store) == 6


def test_more_objects_than_the_bytes_need_are_refused(tmp_path: Path) -> None:
    message = message_of(RecordDict({str(i): ConfigRecord({"x": i}) for i in range(200)}))
    Server(message, policy(tmp_path, "max-bytes-a-round = 1000")).require_refused("more than 90 objects")
    assert Server(message).step() == RUN


class TooLarge(Exception):
    """As gRPC's error for an answer above the channel's limit."""

    def code(self) -> Any:
        return types.SimpleNamespace(name="RESOURCE_EXHAUSTED")

    def details(self) -> str:
        return "CLIENT: Received message larger than max (99 vs. 9)"


@pytest.mark.parametrize("error", [TooLarge(), WireError("answer: it has more than 16777216 bytes")])
def test_an_object_in_too_large_an_answer_refuses_the_message(error: Exception) -> None:
    server = Server(large(1), fails_to_pull=error)
    server.require_refused("answer: it has more than 16777216 bytes")
    assert server.confirmed == [server.message.object_id]


def test_a_run_in_too_large_an_answer_refuses_the_message() -> None:
    server = Server(large(1), fails_to_tell_the_run=TooLarge())
    server.require_refused("answer: it has more than 16777216 bytes")
    assert server.confirmed == [server.message.object_id]


DAMAGED = {
    "no-toml": (b"[tool", "ValueError: Invalid TOML"),
    "no-app": (b"", "ValueError"),
    "deep": (b"a = " + b"[" * 100_000, "RecursionError"),
}


@pytest.mark.parametrize("text,words", DAMAGED.values(), ids=DAMAGED)
def test_a_bundle_that_flower_cannot_read_is_refused(text: bytes, words: str) -> None:
    server = Server(large(1), fab=bundle(("pyproject.toml", text)))
    server.require_refused("its run or bundle cannot be read: " + words)
    assert server.confirmed == [server.message.object_id]


def test_a_bundle_with_another_hash_is_refused_and_its_run_is_not_kept() -> None:
    """Flower stores the run before it compares the hash."""
    server = Server(large(1), hash_str="0" * 64)
    server.require_refused("ValueError: FAB hash mismatch")
    assert server.kept() == ([], 0, [])


def test_a_run_that_the_server_does_not_tell_is_no_refusal() -> None:
    server = Server(large(1), fails_to_tell_the_run=ConnectionError())
    assert server.step() is None
    assert (server.slept, server.confirmed, server.kept()) == ([1.0], [], ([], 0, []))


def test_a_message_whose_parts_do_not_arrive_leaves_no_run() -> None:
    server = Server(large(1), fails_to_pull=ConnectionError())
    assert server.step() is None
    assert server.kept() == ([], 0, [])
    assert server.step(flowers._pull_and_store_message) is None


def test_a_refused_message_of_a_known_run_leaves_the_run() -> None:
    server = Server(large(1))
    assert server.step() == RUN
    server.waiting = [(message := large(2), doubled(message))]
    assert server.step() == RUN
    assert server.confirmed == [server.message.object_id, message.object_id]
    assert server.kept() == ([RUN], 1, [RUN])
    assert server.asked == [RUN]


@pytest.mark.parametrize("text", ["x" * 201, "a\x1b[2J", "a\nb", "\u202e", "é"])
def test_text_that_flower_would_log_is_refused(text: str, caplog: pytest.LogCaptureFixture) -> None:
    message = large(1)
    message.metadata.group_id = text
    message.metadata.__dict__["_message_type"] = f"train.{text}"
    server = Server(message)
    logging.getLogger(LOGGER_NAME).addHandler(caplog.handler)
    assert server.step() == RUN
    (reply,) = [entry.message for entry in server.state.msg_store.values()]
    server.send()
    logging.getLogger(LOGGER_NAME).removeHandler(caplog.handler)
    ((answered, reason),) = server.sent
    message_id = message.metadata.message_id
    assert (answered, server.confirmed, server.pulled) == (message_id, [message_id], 0)
    assert "group_id is longer than 200 characters or not printable ASCII" in reason
    assert (reply.metadata.group_id, reply.metadata.message_type) == ("", "query")
    assert text not in caplog.text.replace("\n", " ") + reason


def test_a_message_without_a_valid_id_is_dropped() -> None:
    """Flower would wait for its reply for good."""
    message = large(1)
    message.metadata.__dict__["_message_id"] = ""
    server = Server(message)
    assert server.step() is None
    assert (server.confirmed, len(server.store), len(server.state.msg_store)) == ([], 0, 0)


@pytest.mark.parametrize("error", [ConnectionError, RunNotRunningException])
def test_a_refusal_that_cannot_be_confirmed_is_answered_all_the_same(error: type[BaseException]) -> None:
    message = large(1)
    server = Server(message, tree=doubled(message), fails_to_confirm=error)
    server.require_refused("names a child twice")
    assert server.confirmed == []


@pytest.mark.parametrize(
    "text,limit",
    [
        ("", None),
        ("max-bytes-a-round = 5", EXTRA_BYTES + 5),
        ("max-bytes-a-round = true", EXTRA_BYTES),
        ("max-bytes-a-round = -5", EXTRA_BYTES),
        ("max-bytes-a-round = ", EXTRA_BYTES),
        ("a = " + "[" * 5000, EXTRA_BYTES),
    ],
)
def test_the_limit_is_that_of_the_policy(tmp_path: Path, text: str, limit: int | None) -> None:
    assert read_limit({"policy": policy(tmp_path, text)}).max_bytes == limit


def test_a_site_without_a_policy_has_no_limit_and_one_whose_policy_is_missing_has_the_least(tmp_path: Path) -> None:
    assert read_limit({}) == MessageLimit(None, "")
    missing = read_limit({"policy": str(tmp_path / "none")})
    assert missing.max_bytes == EXTRA_BYTES
    assert "cannot read the site's policy (FileNotFoundError)" in missing.reason
