"""Check the object tree that a site announces with a reply; FedVeil's sites send trees in only one form.

    Message -- RecordDict -- ArrayRecord -- Array -- ArrayChunk      (a slice of the upload; many)
                          -- ConfigRecord                            (the head of the site's log; at most three)

Flower registers every announced object in one transaction, and all sites share one object namespace. So the guard
checks a tree before Flower sees it.

Formal guarantees, for a tree that `read_tree` returns:
- it has at most `max_nodes` nodes, and an id has the same type and the same children wherever it occurs;
- every object is at the depth shown above for its type, so an Array has one chunk and a chunk has no children.

| tree | result |
|---|---|
| the tree of a reply with an error | only the Message |
| two slices with equal bytes | the ArrayRecord's tree names their Array once |
| children in a different order (Flower's database sorts them) | the same tree |
| an object that names a child twice | refused |
| an id at two depths, or with different children in two places | refused |
| an id in uppercase, or not 64 hex digits | refused |
| a record without children | a ConfigRecord; FedVeil's replies have no empty ArrayRecord |
| deeper than a chunk | refused; the walk is not recursive and stops at `max_nodes` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.proto.message_pb2 import ObjectTree

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.wire import flower_objects
from fedveil.wire.flower_objects import ObjectType, is_object_id


@dataclass(frozen=True)
class AnnouncedObject:
    """The required type and children of an announced object."""

    type: ObjectType
    children: frozenset[str]


@dataclass(frozen=True)
class AnnouncedTree:
    """All objects in a reply, by id."""

    root: str
    objects: Mapping[str, AnnouncedObject]


def max_tree_nodes(max_reply_bytes: int) -> int:
    """Return the maximum number of objects in a reply with this many bytes."""
    return min(2 * flower_objects.max_slices(max_reply_bytes) + limits.EXTRA_TREE_NODES, limits.MAX_TREE_NODES)


def read_tree(tree: ObjectTree, max_nodes: int, is_error: bool) -> AnnouncedTree:
    """Return the objects in a tree. Raises FleetCallRefused unless a valid reply can have this tree."""
    objects: dict[str, AnnouncedObject] = {}
    level, nodes = [(tree, ObjectType.MESSAGE)], 0
    while level:
        below: list[tuple[ObjectTree, ObjectType]] = []
        for node, object_type in level:
            nodes += 1
            if nodes + len(node.children) > max_nodes:
                raise FleetCallRefused(RefusalReason.TREE_SIZE, str(nodes + len(node.children)))
            announced = _announced(node, object_type)
            _require_form(announced, node, is_error)
            if objects.setdefault(node.object_id, announced) != announced:
                raise FleetCallRefused(RefusalReason.TREE_TWICE, node.object_id)
            below += [(child, _type_below(object_type, child)) for child in node.children]
        level = below
    return AnnouncedTree(tree.object_id, objects)


def _announced(node: ObjectTree, object_type: ObjectType) -> AnnouncedObject:
    children = [child.object_id for child in node.children]
    if not is_object_id(node.object_id):
        raise FleetCallRefused(RefusalReason.TREE_FORM, node.object_id)
    if len(set(children)) != len(children):
        raise FleetCallRefused(RefusalReason.TREE_TWICE, node.object_id)
    return AnnouncedObject(object_type, frozenset(children))


def _type_below(parent: ObjectType, child: ObjectTree) -> ObjectType:
    match parent:
        case ObjectType.MESSAGE:
            return ObjectType.RECORD_DICT
        case ObjectType.RECORD_DICT:
            return ObjectType.ARRAY_RECORD if child.children else ObjectType.CONFIG_RECORD
        case ObjectType.ARRAY_RECORD:
            return ObjectType.ARRAY
        case _:
            return ObjectType.ARRAY_CHUNK


def _require_form(announced: AnnouncedObject, node: ObjectTree, is_error: bool) -> None:
    """Raise FleetCallRefused unless an object has the number of children that its type allows."""
    count = len(announced.children)
    match announced.type:
        case ObjectType.MESSAGE:
            is_right = count == (0 if is_error else 1)
        case ObjectType.RECORD_DICT:  # a second ArrayRecord could name the slices of the first one again
            is_right = 1 <= count <= limits.MAX_RECORDS and sum(bool(c.children) for c in node.children) <= 1
        case ObjectType.ARRAY_RECORD:
            is_right = count >= 1
        case ObjectType.ARRAY:
            is_right = count == 1
        case _:
            is_right = count == 0
    if not is_right:
        raise FleetCallRefused(RefusalReason.TREE_FORM, f"{announced.type.value} with {count} children")
