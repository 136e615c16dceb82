"""Check the object tree that a server announces with a message, before Flower's SuperNode registers it.

Flower keeps an object's children as they were first announced, and expands them wherever the object is named.
A tree of 3.4 kB with 16 levels, each of which names the one below twice, becomes one of 18 MB; each further level
doubles it. So a site accepts a tree only if its expansion is the tree that was sent.

Formal guarantees, for a tree that `require_tree` accepts, once Flower's store has registered it:
- `store.get_object_tree(root)` returns the same nodes: at most `max_nodes` of them, on at most `MAX_DEPTH` levels.
  By induction over the levels: for each id, the store has exactly the announced children.

| tree | result |
|---|---|
| an object in two places, with the same children | accepted: two Arrays with equal bytes |
| an object in two places, with different children | WireError |
| an object that names a child twice, or for which the store has other children | WireError |
| more than `max_nodes` nodes, or a level below `MAX_DEPTH` | WireError; the walk is not recursive and stops there |
| an id other than 64 lowercase hex digits, or a root other than the message's id | WireError |
"""

from __future__ import annotations

from typing import Any

from flwr.proto.message_pb2 import ObjectTree

from fedveil.errors import WireError
from fedveil.wire.flower_objects import is_object_id, max_slices

MAX_DEPTH = 5  # Message, RecordDict, ArrayRecord, Array, ArrayChunk
MAX_TREE_NODES = 1 << 16  # 32,000 slices are 42 GB
_MORE_NODES = 64  # Message, RecordDict and records


def max_tree_nodes(max_bytes: int | None) -> int:
    """Return the largest number of objects in a message with this many bytes; None = no limit on the bytes."""
    if max_bytes is None:
        return MAX_TREE_NODES
    return min(2 * max_slices(max_bytes) + _MORE_NODES, MAX_TREE_NODES)


def require_tree(tree: ObjectTree, root: str, max_nodes: int, store: Any) -> None:
    """Raise WireError unless the tree of the message `root` expands to itself. `store`: Flower's ObjectStore."""
    if tree.object_id != root:
        raise WireError("message: the root of its tree is not the message itself")
    children: dict[str, frozenset[str]] = {}
    level, nodes = [tree], 1
    for _ in range(MAX_DEPTH):
        for node in level:
            nodes += len(node.children)
            if nodes > max_nodes:
                raise WireError(f"message: its tree has more than {max_nodes} objects")
            _require_children(node, children, store)
        level = [child for node in level for child in node.children]
    if level:
        raise WireError(f"message: its tree has more than {MAX_DEPTH} levels")


def _require_children(node: ObjectTree, children: dict[str, frozenset[str]], store: Any) -> None:
    """Raise WireError if an object's children repeat, or differ from its children elsewhere in the tree or store."""
    if not is_object_id(node.object_id):
        raise WireError("message: an id in its tree is not 64 hex digits")
    named = frozenset(child.object_id for child in node.children)
    if len(named) != len(node.children):
        raise WireError("message: an object in its tree names a child twice")
    if node.object_id not in children:
        children[node.object_id] = named
        if node.object_id in store and _stored_children(store, node.object_id) != named:
            raise WireError("message: an object in its tree has other children than it has in the store")
    elif children[node.object_id] != named:
        raise WireError("message: an object occurs twice in its tree, with different children")


def _stored_children(store: Any, object_id: str) -> frozenset[str]:
    return frozenset(child.object_id for child in store.get_object_tree(object_id).children)
