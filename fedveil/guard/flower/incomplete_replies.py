"""Deliver a reply to the ServerApp only when all its parts have arrived; until then the round continues.

Flower delivers a reply as soon as it is announced, and the ServerApp then waits for its parts. So a site that
is killed while sending can hold up the round for all sites, as can a site that deliberately sends one part
every other minute. The delay is three minutes if no parts arrive and over an hour if they do, beyond all of the run's
deadlines.

| a reply | Flower's behavior | here |
|---|---|---|
| all parts are present | delivered | delivered |
| parts are missing, and its online site may still push them | delivered; the ServerApp waits | not yet delivered |
| such a reply, after the run's deadline | the ServerApp waits | "no reply within the deadline" |
| such a reply, with no part for three minutes or no sign of life for a minute | the ServerApp waits, then lost | lost |
| parts are missing, and no site was asked to push them | the ServerApp waits for over an hour | lost |
| announced during the check | delivered | not yet delivered: the two exclude each other |

The check asks the store for missing parts, not the push sessions: a site can announce anything, including its
reply below another object, and then the reply belongs to that object's session. No incomplete reply is delivered.

The patch runs in the SuperLink's process. An unpatched SuperLink behaves as in stock Flower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fedveil.guard.flower import link_states

_Replies = Callable[[Any, set[str]], Iterator[tuple[str, str, bool]]]


def patch_incomplete_replies() -> None:
    """Patch the state of this process's SuperLink to deliver only complete replies."""
    link_states.patch_link_states(_only_whole, _in_sql, _in_memory)


def _only_whole(state: Any, replies: _Replies) -> None:
    """Patch Flower's class.

    `replies` gives, for each message, the message, its reply, and whether its site is online and has a session for it.
    """
    one_at_a_time = threading.RLock()
    announce, find = state.store_message_and_object_tree, state.get_message_res

    def store_message_and_object_tree(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            return announce(self, *args, **kwargs)

    def get_message_res(self: Any, message_ids: set[str], run_id: int) -> Any:
        with one_at_a_time:
            reply_entries = list(replies(self, message_ids)) if message_ids else []
            lacking = {
                message: may_come
                for message, reply, may_come in reply_entries
                if link_states.is_object_missing(self.object_store, reply)
            }
            lost = {message for message, may_come in lacking.items() if not may_come}
            self.delete_messages(lost)  # Flower reports these as lost
            return find(self, message_ids - (lacking.keys() - lost), run_id)

    state.store_message_and_object_tree, state.get_message_res = store_message_and_object_tree, get_message_res


def _in_memory(state: Any, message_ids: set[str]) -> Iterator[tuple[str, str, bool]]:
    from flwr.supercore.date import now

    current = now()
    with state.lock, state._lock_object_push_sessions:
        for message_id in message_ids & state.message_ins_id_to_message_res_id.keys() & state.message_ins_store.keys():
            reply = state.message_ins_id_to_message_res_id[message_id]
            session = state._object_push_sessions.get(state._object_push_session_by_root.get(reply, ""))
            node = state.nodes.get(state.message_ins_store[message_id].metadata.dst_node_id)
            is_online = node is not None and node.online_until >= current.timestamp()
            yield message_id, reply, is_online and session is not None and session.expires_at > current


def _in_sql(state: Any, message_ids: set[str]) -> Iterator[tuple[str, str, bool]]:
    from flwr.supercore.date import now
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession as Session
    from flwr.supercore.state.schema.corestate_models import ObjectPushSessionRoot as Root
    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
    from sqlalchemy import and_, select

    current = now()
    query = (
        select(MessageIns.message_id, MessageRes.message_id, Session.session_id, Node.node_id)
        .join(MessageRes, MessageRes.reply_to_message_id == MessageIns.message_id)
        .outerjoin(Root, Root.root_object_id == MessageRes.message_id)
        .outerjoin(Session, and_(Session.session_id == Root.session_id, Session.expires_at > current))
        .outerjoin(Node, and_(Node.node_id == MessageIns.dst_node_id, Node.online_until >= current.timestamp()))
        .where(MessageIns.message_id.in_(message_ids))
    )
    with state.session() as session:
        rows = session.execute(query).all()
    for message_id, reply, of_session, node in rows:
        yield message_id, reply, of_session is not None and node is not None
