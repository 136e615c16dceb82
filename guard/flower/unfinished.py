"""A reply is handed to the ServerApp once all of its parts have come, and until then the round goes on without it.

Flower hands a reply out as soon as it is announced, and the ServerApp then asks for its parts until they are there. A
site that is killed while it sends, or that sends a part every other minute on purpose, thus holds up the round of all
sites: for three minutes without a part, for over an hour with them, past every deadline of the run.

| a reply | Flower's own | here |
|---|---|---|
| all of it is there | handed out | handed out |
| parts are missing, its site is online | handed out; the ServerApp waits for them | not yet there |
| the same, and the run's deadline is over | waited for | "no reply within the deadline" |
| the same, its site has shown no sign of life for a minute | waited for | "no sign of life" |
| the same, no part for three minutes | lost | lost |
| announced while it is looked for | handed out | not yet there: the two exclude each other |

It is part of the SuperLink's process. A SuperLink that is Flower's own does as Flower does.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

_Unfinished = Callable[[Any, set[str]], set[str]]


def of_flower() -> None:
    """From now on the state of a SuperLink of this process hands out whole replies alone."""
    for module, name, unfinished in (
        ("sql_linkstate", "SqlLinkState", _in_sql),
        ("in_memory_linkstate", "InMemoryLinkState", _in_memory),
    ):
        state = getattr(importlib.import_module(f"flwr.server.superlink.linkstate.{module}"), name)
        _only_whole(state, unfinished)


def _only_whole(state: Any, unfinished: _Unfinished) -> None:
    one_at_a_time = threading.RLock()
    announce, find = state.store_message_and_object_tree, state.get_message_res

    def store_message_and_object_tree(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            return announce(self, *args, **kwargs)

    def get_message_res(self: Any, message_ids: set[str], run_id: int) -> Any:
        with one_at_a_time:
            wanted = message_ids - unfinished(self, message_ids) if message_ids else message_ids
            return find(self, wanted, run_id)

    state.store_message_and_object_tree, state.get_message_res = store_message_and_object_tree, get_message_res


def _in_memory(state: Any, message_ids: set[str]) -> set[str]:
    """Of the messages, those whose site is online and whose reply lacks parts that may still come."""
    from flwr.supercore.date import now

    found, current = set(), now()
    with state.lock, state._lock_object_push_sessions:
        for message_id in message_ids:
            reply = state.message_ins_id_to_message_res_id.get(message_id, "")
            session = state._object_push_sessions.get(state._object_push_session_by_root.get(reply, ""))
            if session is None or not session.pending_object_ids or session.expires_at <= current:
                continue
            message = state.message_ins_store.get(message_id)
            node = state.nodes.get(message.metadata.dst_node_id) if message else None
            if node is not None and node.online_until >= current.timestamp():
                found.add(message_id)
    return found


def _in_sql(state: Any, message_ids: set[str]) -> set[str]:
    """As `_in_memory`."""
    from flwr.supercore.date import now
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession as Session
    from flwr.supercore.state.schema.corestate_models import ObjectPushSessionRoot as Root
    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
    from sqlalchemy import select

    current = now()
    lacking = (
        select(MessageIns.message_id)
        .join(MessageRes, MessageRes.reply_to_message_id == MessageIns.message_id)
        .join(Root, Root.root_object_id == MessageRes.message_id)
        .join(Session, Session.session_id == Root.session_id)
        .join(Node, Node.node_id == MessageIns.dst_node_id)
        .where(
            MessageIns.message_id.in_(message_ids),
            Session.pending_count > 0,
            Session.expires_at > current,
            Node.online_until >= current.timestamp(),
        )
    )
    with state.session() as session:
        return set(session.scalars(lacking))
