"""Deliver a message again if its site polls again without having confirmed receipt.

Flower marks a message as delivered when a site requests it. If the answer is lost, for example with the
connection, the next request returns nothing. The server then waits for the reply until the round's
deadline.

| a site polls, and its last message | Flower returns | here |
|---|---|---|
| was received | the next message | the next message |
| was sent, but lost in transit | nothing, or the next message | that message again |
| was sent, but not all its parts arrived, or the site was killed | nothing, or the next message | that message again |
| has been answered, received or not | the next message | the next message |
| is past its deadline, or its run has ended | the next message | the next message |
| belongs to another site | nothing | nothing |

A SuperNode requests one message at a time and confirms each before it requests the next. On confirmation
the server drops the message's parts, so a message that still has all its parts was not received. Only the
site can ask, and it gets only messages addressed to it. Its ledger records the use of its examples for a
repeated client round, as for any round (`max-retries`).

The patch runs in the SuperLink's process. An unpatched SuperLink behaves as in stock Flower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedveil.guard.flower import link_states

_Mark = Callable[[Any, int], None]


def patch_redelivery() -> None:
    """Patch the state of this process's SuperLink to deliver unconfirmed messages again."""
    link_states.patch_link_states(_again, _in_sql, _in_memory)


def _again(state: Any, mark: _Mark) -> None:
    """Patch Flower's class. `mark` marks a node's messages as undelivered if they were not received."""
    hand_out = state.get_message_ins

    def get_message_ins(self: Any, node_id: int, limit: int | None, **more: Any) -> Any:
        mark(self, node_id)
        return hand_out(self, node_id, limit, **more)

    state.get_message_ins = get_message_ins


def _in_memory(state: Any, node_id: int) -> None:
    with state.lock:
        for name, message in state.message_ins_store.items():
            of, answered = message.metadata, name in state.message_ins_id_to_message_res_id
            if of.dst_node_id != node_id or not of.delivered_at or answered:
                continue
            if not link_states.is_object_missing(state.object_store, name):
                of.delivered_at = ""


def _in_sql(state: Any, node_id: int) -> None:
    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import select, update

    answered = select(MessageRes.message_id).where(MessageRes.reply_to_message_id == MessageIns.message_id).exists()
    handed_out = select(MessageIns.message_id).where(
        MessageIns.dst_node_id == uint64_to_int64(node_id), MessageIns.delivered_at != "", ~answered
    )
    with state.session() as session:
        names = [
            name
            for name in session.scalars(handed_out).all()
            if not link_states.is_object_missing(state.object_store, name)
        ]
        if names:
            session.execute(update(MessageIns).where(MessageIns.message_id.in_(names)).values(delivered_at=""))
