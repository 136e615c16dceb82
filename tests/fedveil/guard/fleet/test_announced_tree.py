"""Trees of objects: those of honest replies, and those that a hostile site would announce."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from flwr.proto.message_pb2 import ObjectTree

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.announced_tree import max_tree_nodes, read_tree
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.wire.chunking import SLICE_BYTES
from fedveil.wire.flower_objects import ObjectType
from tests.fedveil.guard.fleet.replies import make_reply, upload


def leaf(*children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=os.urandom(32).hex(), children=children)


def honest() -> ObjectTree:
    return make_reply().request.message_object_trees[0]


def why_not(tree: ObjectTree, most: int = 100) -> RefusalReason:
    with pytest.raises(FleetCallRefused) as why:
        read_tree(tree, most, is_error=False)
    return why.value.reason


def test_each_object_has_the_type_of_its_place() -> None:
    reply = make_reply()
    tree = read_tree(reply.request.message_object_trees[0], 100, is_error=False)
    assert tree.root == reply.root
    types = {id_: content.split(b" ")[0].decode() for id_, content in reply.objects.items()}
    assert {id_: announced.type.value for id_, announced in tree.objects.items()} == types
    assert set(types.values()) == {kind.value for kind in ObjectType}


def test_equal_slices_are_named_once() -> None:
    reply = make_reply(upload(b"\0" * 100, b"\0" * 100, b"\0" * 100))
    assert len(read_tree(reply.request.message_object_trees[0], 100, is_error=False).objects) == 6


def test_children_may_stand_in_another_order() -> None:
    tree, other = honest(), ObjectTree()
    other.CopyFrom(tree)
    record = _record(other)
    arrays = [ObjectTree.FromString(child.SerializeToString()) for child in record.children][::-1]
    del record.children[:]
    record.children.extend(arrays)
    assert read_tree(tree, 100, False) == read_tree(other, 100, False)


def _no_dict(tree: ObjectTree) -> None:
    del tree.children[:]


def _two_dicts(tree: ObjectTree) -> None:
    tree.children.append(leaf(leaf()))


def _two_uploads(tree: ObjectTree) -> None:
    tree.children[0].children.append(leaf(leaf(leaf())))


def _many_records(tree: ObjectTree) -> None:
    tree.children[0].children.extend(leaf() for _ in range(3))


def _empty_dict(tree: ObjectTree) -> None:
    del tree.children[0].children[:]


def _two_chunks(tree: ObjectTree) -> None:
    _record(tree).children[0].children.append(leaf())


def _no_chunk(tree: ObjectTree) -> None:
    del _record(tree).children[0].children[:]


def _deeper(tree: ObjectTree) -> None:
    _record(tree).children[0].children[0].children.append(leaf())


def _record(tree: ObjectTree) -> ObjectTree:
    return next(child for child in tree.children[0].children if child.children)


@pytest.mark.parametrize(
    "change",
    [_no_dict, _two_dicts, _two_uploads, _many_records, _empty_dict, _two_chunks, _no_chunk, _deeper],
)
def test_another_form_is_refused(change: Callable[[ObjectTree], None]) -> None:
    tree = honest()
    change(tree)
    assert why_not(tree) is RefusalReason.TREE_FORM


@pytest.mark.parametrize("text", ["", "ab" * 31, "AB" * 32, "g" * 64, "ab" * 32 + "\n"])
def test_an_id_is_a_hash(text: str) -> None:
    tree = honest()
    _record(tree).children[0].children[0].object_id = text
    assert why_not(tree) is RefusalReason.TREE_FORM


def test_a_child_stands_once() -> None:
    tree = honest()
    _record(tree).children.append(_record(tree).children[0])
    assert why_not(tree) is RefusalReason.TREE_TWICE


def test_an_id_lies_at_one_depth_with_the_same_children() -> None:
    deeper, other = honest(), honest()
    _record(deeper).children[0].children[0].object_id = deeper.object_id
    assert why_not(deeper) is RefusalReason.TREE_TWICE
    first, second = _record(other).children[:2]
    second.object_id = first.object_id
    assert why_not(other) is RefusalReason.TREE_TWICE


def test_made_up_objects_by_the_thousand_are_refused_before_they_are_read() -> None:
    wide = honest()
    wide.children[0].children.extend(leaf() for _ in range(40_000))
    assert why_not(wide, 4096) is RefusalReason.TREE_SIZE
    deep = ObjectTree(object_id="ab" * 32)
    for _ in range(90):
        deep = leaf(deep)
    assert why_not(deep, 4096) is RefusalReason.TREE_FORM


def test_as_many_objects_as_the_largest_reply_has_are_admitted() -> None:
    slices = 10
    reply = make_reply(upload(*(bytes([i]) * 10 for i in range(slices))))
    most = max_tree_nodes(slices * SLICE_BYTES)
    tree = reply.request.message_object_trees[0]
    assert len(read_tree(tree, most, False).objects) == 2 * slices + 4 <= most
    assert why_not(tree, 2 * slices + 3) is RefusalReason.TREE_SIZE
    assert max_tree_nodes(1 << 40) == limits.MAX_TREE_NODES
