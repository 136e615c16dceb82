"""Check the object tree that a server announces with a message, before Flower's SuperNode registers it.

Flower keeps an object's children as they were first announced, and expands them at every place that names the object.
A tree of 3.4 kB with 16 levels that each name the one below twice becomes one of 18 MB; each further level doubles
it. So a site accepts a tree only if its expansion is the tree that was sent.

Formal guarantees, for a tree that `require_tree` accepts, once Flower's store has registered it:
- `store.get_object_tree(root)` returns the same nodes, so at most `max_nodes`, and at most `MAX_DEPTH` levels of them.
  By induction over the levels: the store has exactly the announced children for each id.

| tree | result |
|---|---|
| an object in two places, with the same children | accepted: two Arrays with equal bytes |
| an object in two places, with different children | WireError |
| an object that names a child twice, or that the store has with other children | WireError |
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
        raise WireError("message: expected a tree whose root is the message, found another root")
    children: dict[str, frozenset[str]] = {}
    level, nodes = [tree], 1
    for _ in range(MAX_DEPTH):
        for node in level:
            nodes += len(node.children)
            if nodes > max_nodes:
                raise WireError(f"message: expected a tree of at most {max_nodes} objects, found more")
            _require_children(node, children, store)
        level = [child for node in level for child in node.children]
    if level:
        raise WireError(f"message: expected a tree of at most {MAX_DEPTH} levels, found more")


def _require_children(node: ObjectTree, children: dict[str, frozenset[str]], store: Any) -> None:
    """Raise WireError if an object's children repeat, or differ from those elsewhere in the tree or in the store."""
    if not is_object_id(node.object_id):
        raise WireError("message: expected ids of 64 hex digits in its tree, found another")
    named = frozenset(child.object_id for child in node.children)
    if len(named) != len(node.children):
        raise WireError("message: expected distinct children in its tree, found an object that names one twice")
    if node.object_id not in children:
        children[node.object_id] = named
        if node.object_id in store and _stored_children(store, node.object_id) != named:
            raise WireError("message: expected the children that an object already has, found others in its tree")
    elif children[node.object_id] != named:
        raise WireError("message: expected one list of children for each object in its tree, found two for one object")


def _stored_children(store: Any, object_id: str) -> frozenset[str]:
    return frozenset(child.object_id for child in store.get_object_tree(object_id).children)
