"""Trees that a lying server announces: what Flower's own store makes of them, and which of them a site accepts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import ObjectStoreFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.guard.received_tree import MAX_DEPTH, MAX_TREE_NODES, max_tree_nodes, require_tree
from tests.fedveil.guard.fleet.replies import make_reply, upload

RUN, MOST = 7, 200


def id_of(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def tree_of(name: object, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=id_of(name), children=children)


def count_nodes(tree: ObjectTree) -> int:
    """By hand, without Flower's own walk."""
    left, nodes = [tree], 0
    while left:
        node = left.pop()
        nodes += 1
        left.extend(node.children)
    return nodes


def as_sets(tree: ObjectTree) -> object:
    """Without the order of the children, which Flower's stores do not keep."""
    return tree.object_id, frozenset(as_sets(child) for child in tree.children)


def doubling(levels: int) -> ObjectTree:
    """Each level names the one below it twice; its children stand only where it comes first."""
    below: list[ObjectTree] = [tree_of(0)]
    for level in range(1, levels + 1):
        below.append(tree_of(level, tree_of(level - 1), tree_of(level - 1)))
    return tree_of("root", *below)


def require(tree: ObjectTree, most: int = MOST, store: object = None) -> None:
    require_tree(tree, tree.object_id, most, {} if store is None else store)


def test_flowers_store_doubles_such_a_tree_at_each_level() -> None:
    """So 3.4 kB become 18 MB at 16 levels, as measured once, in 11 s on a busy machine."""
    sizes = []
    for levels in (8, 9, 10):
        store = ObjectStoreFactory().store()
        store.preregister(RUN, doubling(levels))
        sizes.append(count_nodes(store.get_object_tree(id_of("root"))))
    assert sizes[2] > 4000
    assert [round(b / a, 1) for a, b in pairwise(sizes)] == [2.0, 2.0]
    assert doubling(10).ByteSize() < 3000
    with pytest.raises(WireError):
        require(doubling(10), 10_000)


def trees(depth: int) -> st.SearchStrategy[ObjectTree]:
    """Any tree of few names."""
    names = st.integers(0, 5)
    if depth == 0:
        return names.map(tree_of)
    return st.builds(lambda name, below: tree_of(name, *below), names, st.lists(trees(depth - 1), max_size=2))


TABLES = st.tuples(*(st.frozensets(st.integers(0, n - 1)) if n else st.just(frozenset[int]()) for n in range(4)))


def listed(table: tuple[frozenset[int], ...], name: int = 3) -> ObjectTree:
    """A tree in which each name has its children of the table wherever it comes."""
    return tree_of(name, *(listed(table, child) for child in sorted(table[name])))


@settings(max_examples=60)
@given(st.lists(st.one_of(trees(3), TABLES.map(listed)), min_size=1, max_size=4))
def test_what_is_accepted_expands_to_what_was_sent(announced: list[ObjectTree]) -> None:
    """Message after message, without an end of the earlier ones: Flower's store gives back just the tree that came."""
    store = ObjectStoreFactory().store()
    for number, body in enumerate(announced):
        tree = tree_of(f"message {number}", body)
        try:
            require(tree, MOST, store)
        except WireError:
            continue
        store.preregister(RUN, tree)
        expanded = store.get_object_tree(tree.object_id)
        assert as_sets(expanded) == as_sets(tree)
        assert count_nodes(expanded) == count_nodes(tree) <= MOST


@settings(max_examples=60)
@given(st.one_of(trees(3), TABLES.map(listed)))
def test_an_honest_tree_is_accepted(tree: ObjectTree) -> None:
    """One with names a child twice, whose objects have the same children everywhere, however often they come."""
    children: dict[str, object] = {}
    for node in walk(tree):
        below = [child.object_id for child in node.children]
        is_right = len(set(below)) == len(below) and children.setdefault(node.object_id, set(below)) == set(below)
        if not is_right or count_nodes(tree) > MOST:
            with pytest.raises(WireError):
                require(tree)
            return
    require(tree)


def walk(tree: ObjectTree) -> Iterator[ObjectTree]:
    yield tree
    for child in tree.children:
        yield from walk(child)


def expand(tree: ObjectTree, most: int = MOST) -> ObjectTree:
    """What Flower's store makes of a tree that is accepted."""
    require(tree, most)
    store = ObjectStoreFactory().store()
    store.preregister(RUN, tree)
    return store.get_object_tree(tree.object_id)


def test_the_tree_of_a_message_of_fedveil_is_accepted() -> None:
    for slices in ([b"a"], [b"\0" * 10] * 3, [bytes([n]) * 10 for n in range(50)]):
        tree = make_reply(upload(*slices)).request.message_object_trees[0]
        assert as_sets(expand(tree, max_tree_nodes(len(slices) * (5 << 18)))) == as_sets(tree)


def chain(levels: int) -> ObjectTree:
    tree = tree_of(levels)
    for level in range(levels - 1, 0, -1):
        tree = tree_of(level, tree)
    return tree


@pytest.mark.parametrize(
    "tree,words",
    [
        (tree_of("root", tree_of("a"), tree_of("a")), "names a child twice"),
        (tree_of("root", tree_of("b", tree_of("a", tree_of("c"))), tree_of("a")), "with different children"),
        (tree_of("root", tree_of("a", tree_of("root"))), "with different children"),
        (tree_of("root", *map(tree_of, range(MOST))), f"more than {MOST} objects"),
        (ObjectTree(object_id=id_of("root").upper()), "64 hex digits"),
        (ObjectTree(object_id=id_of("root"), children=[ObjectTree(object_id="0x" + "1" * 62)]), "64 hex digits"),
        (chain(MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
    ],
)
def test_another_tree_is_refused(tree: ObjectTree, words: str) -> None:
    with pytest.raises(WireError, match=words):
        require(tree)


def test_the_deepest_and_the_largest_are_accepted() -> None:
    for tree in (chain(MAX_DEPTH), tree_of("root", *map(tree_of, range(MOST - 1)))):
        assert as_sets(expand(tree)) == as_sets(tree)


def test_the_root_is_the_message() -> None:
    with pytest.raises(WireError, match="the root of its tree is not the message"):
        require_tree(tree_of("a"), id_of("b"), MOST, {})


def test_the_children_that_the_store_has_cannot_change() -> None:
    """Else a second message names as bare what the first one gave children, level by level."""
    store = ObjectStoreFactory().store()
    store.preregister(RUN, tree_of("first", tree_of("a", tree_of("b"))))
    with pytest.raises(WireError, match="than it has in the store"):
        require(tree_of("second", tree_of("c", tree_of("a"))), MOST, store)
    require(tree_of("second", tree_of("c", tree_of("a", tree_of("b")))), MOST, store)


def test_the_number_of_nodes_follows_from_the_bytes() -> None:
    assert max_tree_nodes(None) == max_tree_nodes(1 << 60) == MAX_TREE_NODES
    assert 2 * 16 < max_tree_nodes(16 * (5 << 18)) < 2 * 16 + 100
