"""Patch Flower's two SuperLink states, in-memory and SQL, and query their object stores."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Of = TypeVar("Of")


@dataclass(frozen=True)
class InstructionRow:
    """A message from the ServerApp to a site, which Flower stores until its reply is delivered.

    Attributes:
        message_id: the id of its root object; random bytes in the content make it impossible to guess.
        reply_id: the message id of the reply that Flower has; "" if there is none.
    """

    message_id: str
    run_id: int
    node_id: int
    message_type: str
    group_id: str
    created_at: float
    ttl: float
    reply_id: str

    @property
    def expires(self) -> float:
        """Return the time when the instruction expires, in seconds since 1970."""
        return self.created_at + self.ttl


def patch_link_states(how: Callable[[Any, Of], None], in_sql: Of, in_memory: Of) -> None:
    """Call `how` with each of the two classes and the argument for that class."""
    for module, name, of_it in (
        ("sql_linkstate", "SqlLinkState", in_sql),
        ("in_memory_linkstate", "InMemoryLinkState", in_memory),
    ):
        how(getattr(importlib.import_module(f"flwr.server.superlink.linkstate.{module}"), name), of_it)


def is_object_missing(store: Any, root: str) -> bool:
    """Return whether any object in the tree below `root` is missing, or `root` itself is unknown."""
    entries = getattr(store, "store", None)
    if isinstance(entries, dict):  # InMemoryObjectStore
        with store.lock_store:
            seen, left = set[str](), [root]
            while left:
                if (name := left.pop()) not in seen:
                    seen.add(name)
                    if (entry := entries.get(name)) is None or not entry.is_available:
                        return True
                    left += entry.child_object_ids
        return False

    from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
    from sqlalchemy import func, literal, select

    # A site chooses the size of its tree: the walk stops at the first missing object, as above.
    tree = select(literal(root).label("name")).cte(recursive=True)
    tree = tree.union(select(ObjectChild.child_id).join(tree, ObjectChild.parent_id == tree.c.name))
    there = func.coalesce(StoredObject.is_available, 0) == 1
    missing = select(tree.c.name).outerjoin(StoredObject, StoredObject.object_id == tree.c.name).where(~there).limit(1)
    with store.session() as session:
        return session.scalar(missing) is not None


def find_instruction(state: Any, message_id: str) -> InstructionRow | None:
    """Return the instruction with this id, for any site, delivered or not."""
    return next(_instructions(state, message_id=message_id), None)


def instructions_of_node(state: Any, node_id: int, run_id: int) -> list[InstructionRow]:
    """Return a run's instructions for a site, delivered or not, newest first."""
    rows = _instructions(state, node_id=node_id, run_id=run_id)
    return sorted(rows, key=lambda row: (row.created_at, row.message_id), reverse=True)


def runs_with_objects(state: Any) -> set[int]:
    """Return the runs that have objects in the object store."""
    store = state.object_store
    if isinstance(getattr(store, "store", None), dict):  # InMemoryObjectStore
        with store.lock_store:
            return {run for run, objects in store.run_objects_mapping.items() if objects}

    from flwr.supercore.state.schema.objectstore_models import RunObject
    from flwr.supercore.utils import int64_to_uint64
    from sqlalchemy import select

    with store.session() as session:
        return {int64_to_uint64(run) for run in session.scalars(select(RunObject.run_id).distinct())}


def _instructions(state: Any, **which: Any) -> Iterator[InstructionRow]:
    """Yield the instructions whose fields match `which`."""
    if hasattr(state, "message_ins_store"):  # InMemoryLinkState
        with state.lock:
            replies = dict(state.message_ins_id_to_message_res_id)
            known = which.get("message_id")
            messages = state.message_ins_store
            chosen = list(messages.values()) if known is None else [messages[known]] if known in messages else []
        for message in chosen:
            of = message.metadata
            row = InstructionRow(
                of.message_id, of.run_id, of.dst_node_id, of.message_type, of.group_id, of.created_at, of.ttl,
                replies.get(of.message_id, ""),
            )  # fmt: skip
            if all(getattr(row, name) == value for name, value in which.items()):
                yield row
        return

    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
    from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
    from sqlalchemy import select

    columns = {"message_id": MessageIns.message_id, "run_id": MessageIns.run_id, "node_id": MessageIns.dst_node_id}
    query = select(
        MessageIns.message_id, MessageIns.run_id, MessageIns.dst_node_id, MessageIns.message_type, MessageIns.group_id,
        MessageIns.created_at, MessageIns.ttl, MessageRes.message_id,
    ).outerjoin(MessageRes, MessageRes.reply_to_message_id == MessageIns.message_id)  # fmt: skip
    for name, value in which.items():
        query = query.where(columns[name] == (value if name == "message_id" else uint64_to_int64(value)))
    with state.session() as session:
        rows = session.execute(query).all()
    for message_id, run_id, node_id, message_type, group_id, created_at, ttl, reply_id in rows:
        yield InstructionRow(
            message_id, int64_to_uint64(run_id), int64_to_uint64(node_id), message_type, group_id or "", created_at,
            ttl, reply_id or "",
        )  # fmt: skip
