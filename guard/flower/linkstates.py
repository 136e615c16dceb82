"""Flower's two states of a SuperLink, in memory and in SQL, and what is asked of the store of parts beside them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

Of = TypeVar("Of")


def change(how: Callable[[Any, Of], None], in_sql: Of, in_memory: Of) -> None:
    """Hands each of the classes to `how`, with what belongs to it."""
    for module, name, of_it in (
        ("sql_linkstate", "SqlLinkState", in_sql),
        ("in_memory_linkstate", "InMemoryLinkState", in_memory),
    ):
        how(getattr(importlib.import_module(f"flwr.server.superlink.linkstate.{module}"), name), of_it)


def lacks(store: Any, root: str) -> bool:
    """Whether an object of the tree below `root` is not there, or `root` itself is unknown."""
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

    # A site announces a tree of its own size: the walk stops at the first object that is not there, as above.
    tree = select(literal(root).label("name")).cte(recursive=True)
    tree = tree.union(select(ObjectChild.child_id).join(tree, ObjectChild.parent_id == tree.c.name))
    there = func.coalesce(StoredObject.is_available, 0) == 1
    missing = select(tree.c.name).outerjoin(StoredObject, StoredObject.object_id == tree.c.name).where(~there).limit(1)
    with store.session() as session:
        return session.scalar(missing) is not None
