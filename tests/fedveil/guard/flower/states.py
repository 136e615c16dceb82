"""A SuperLink's state, Flower's own of each kind, with two sites online."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

STATES = (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState)


class Superlink:
    """A state with two sites online, each with one message of one run."""

    def __init__(self, file: str = "", parts: str = "") -> None:
        manager = NoOpFederationManager()
        store = (ObjectStoreFactory(parts) if parts else ObjectStoreFactory()).store()
        if not file:
            self.state: Any = STATES[0](manager, store)
        else:
            self.state = STATES[1](file, manager, store)
            self.state.initialize()
        self.run = self.state.create_run(
            "us/toy", "0.1.0", "0", {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        self.nodes = [self.state.create_node("us", "us", bytes([i]), 30.0) for i in range(2)]
        self.sent: list[str] = []
        for site, node in enumerate(self.nodes):
            self.state.activate_node(node, 30.0)
            self.send(site)

    def send(self, site: int) -> int:
        """One more message for the site, with all of its parts: its number."""
        message = self._made(SUPERLINK_NODE_ID, self.nodes[site], "")
        session, missing = self._announced(message)
        parts = get_all_nested_objects(message)
        for name in missing:
            self.take(session, name, parts[name].deflate())
        self.sent.append(message.metadata.message_id)
        return len(self.sent) - 1

    def _made(self, by: int, to: int, answers: str) -> Message:
        content = RecordDict({"of": ConfigRecord({"site": str(by)})})  # its own: Flower keeps equal parts once
        with no_object_id_recompute():
            seconds = 50.0 if answers else 100.0  # a reply's end is not after that of the message it answers
            made = Message(
                content, metadata=Metadata(self.run, "", by, to, answers, "", now().timestamp(), seconds, "train")
            )
            made.metadata.__dict__["_message_id"] = made.object_id
        return made

    def _announced(self, message: Message, above: str = "") -> tuple[str, list[str]]:
        session, tree = self.state.start_session(self.run), get_object_tree(message)
        tree = ObjectTree(object_id=above, children=[tree]) if above else tree
        stored, missing = self.state.store_message_and_object_tree(message, tree, session)
        assert stored
        return session, missing

    def answer(self, site: int, reply: Message | None = None, above: str = "") -> tuple[str, dict[str, bytes]]:
        """The site announces its reply, of which no part has come: the session, and the parts by name.

        With `above` its tree is below an object of that name, which is no message.
        """
        reply = reply or self.reply(site)
        session, missing = self._announced(reply, above)
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        return session, {name: parts[name] for name in missing if name != above}

    def reply(self, site: int) -> Message:
        return self._made(self.nodes[site], SUPERLINK_NODE_ID, self.sent[site])

    def take(self, session: str, name: str, part: bytes) -> None:
        assert self.state.store_object(self.run, session, name, part)

    def found(self, *sites: int) -> list[int]:
        """Whose replies the ServerApp is given, errors among them as -1."""
        asked = {self.sent[site] for site in sites}
        replies = self.state.get_message_res(asked, self.run)
        return sorted(
            -1 if reply.has_error() else self.sent.index(reply.metadata.reply_to_message_id) for reply in replies
        )


def create_database(file: Path) -> None:
    """Write a database with Flower's tables and nothing in them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No path_separator")  # Flower's, of a new database
        state: Any = STATES[1](str(file), NoOpFederationManager(), ObjectStoreFactory().store())
        state.initialize()
    state._engine.dispose()


def copy_superlink(clean: Path, file: Path, with_objects: bool = True) -> Superlink:
    """Return a SuperLink on a copy of a clean database, which holds its objects too, or else a dictionary does."""
    shutil.copy(clean, file)
    with pytest.MonkeyPatch.context() as patch:  # the tables are there, and to look takes a second each time
        patch.setattr(sql_mixin, "run_migrations", lambda engine: None)
        patch.setattr(STATES[1], "get_metadata", lambda self: None)
        return Superlink(str(file), str(file) if with_objects else "")
