"""Objects of a reply as an honest site sends them, and each with what a hostile one would change."""

from __future__ import annotations

import json

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.object_form import check_object
from fedveil.guard.fleet.refusal import FleetCallRefused, RefusalReason
from fedveil.wire.chunking import SLICE_BYTES
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    json_body,
    make_reply,
    object_bytes,
    object_id,
    split,
    upload,
)


def why_not(reply: Reply, id_: str, content: bytes | None = None) -> RefusalReason:
    with pytest.raises(FleetCallRefused) as why:
        check_object(reply.announcement(), id_, reply.objects[id_] if content is None else content)
    return why.value.reason


def with_body(type_: str, body: bytes, reply: Reply | None = None) -> tuple[Reply, str]:
    """A reply whose first object of a type has another body, and that object's id."""
    reply = reply or make_reply()
    old = reply.of_type(type_)
    content = object_bytes(type_, split(reply.objects[old])[1], body)
    return exchange_object(reply, old, content), object_id(content)


def body_of(type_: str) -> dict:
    reply = make_reply()
    return json.loads(split(reply.objects[reply.of_type(type_)])[2])


@pytest.mark.parametrize(
    "content",
    [None, upload(b"\0" * 100, b"\0" * 100), upload(b"x" * SLICE_BYTES, b"y"), Error(2, "why"), Error(0, "")],
    ids=["two slices", "equal slices", "a whole slice", "error", "empty error"],
)
def test_every_object_of_an_honest_reply_passes_and_flower_reads_them(content: object) -> None:
    reply = make_reply(content)  # type: ignore[arg-type]
    announced = reply.announcement()
    bodies = [check_object(announced, id_, data) for id_, data in reply.objects.items()]
    assert sum(bodies) < announced.max_bytes
    assert isinstance(inflate_object_from_contents(reply.root, dict(reply.objects)), Message)


def test_the_records_of_a_refusal_pass() -> None:
    reply = make_reply(RecordDict({"refusal": ConfigRecord({"code": 2}), "signature": ConfigRecord({"key": "x"})}))
    for id_, data in reply.objects.items():
        check_object(reply.announcement(), id_, data)


def test_an_object_is_announced_and_has_its_hash() -> None:
    reply = make_reply()
    chunk = reply.of_type("ArrayChunk")
    assert why_not(reply, "ab" * 32, b"") is RefusalReason.NOT_ANNOUNCED
    for content in (b"", reply.objects[chunk] + b"x", reply.objects[chunk][:-1], reply.objects[reply.root]):
        assert why_not(reply, chunk, content) is RefusalReason.HASH


@pytest.mark.parametrize(
    "content",
    [
        b"ArrayChunk  3\0abcd", b"ArrayChunk  +4\0abcd", b"ArrayChunk  04\0abcd", b"ArrayChunk  4abcd",
        b"ArrayChunk 4\0abcd", b" ArrayChunk  4\0abcd", b"ArrayChunk  4 \0abcd", b"ArrayChunk  \xd9\xa4\0abcd",
        b"\0", b"",
    ],
)  # fmt: skip
def test_a_head_has_one_form(content: bytes) -> None:
    reply = make_reply()
    array = next(record for record in reply.request.message_object_trees[0].children[0].children if record.children)
    array.children[0].children[0].object_id = object_id(content)
    assert why_not(reply, object_id(content), content) is RefusalReason.HEAD


@pytest.mark.parametrize("type_", ["ConfigRecord", "MetricRecord", "Array", "Unknown"])
def test_an_object_has_the_type_of_its_place(type_: str) -> None:
    """A root that is no Message ended a run with 25 bytes."""
    reply = make_reply(Error(2, "x"))
    changed = exchange_object(reply, reply.root, object_bytes(type_, [], b""))
    assert why_not(changed, changed.root) is RefusalReason.OBJECT_TYPE


def test_an_object_has_the_announced_children() -> None:
    reply = make_reply()
    record = reply.of_type("ArrayRecord")
    _, children, body = split(reply.objects[record])
    for others in (children[:1], [*children, "ab" * 32], children[:1] * 2, [*children, children[0]], []):
        content = object_bytes("ArrayRecord", others, body)
        changed = exchange_object(reply, record, content)
        announced = changed.request.message_object_trees[0].children[0]
        node = next(child for child in announced.children if child.object_id == object_id(content))
        del node.children[:]
        node.children.extend(reply.request.message_object_trees[0].children[0].children[0].children)
        assert why_not(changed, object_id(content)) is RefusalReason.CHILDREN
    content = object_bytes("ArrayRecord", children[::-1], body)  # Flower's database sorts them
    check_object(exchange_object(reply, record, content).announcement(), object_id(content), content)


@pytest.mark.parametrize(
    "field,value",
    [
        ("reply_to_message_id", "cd" * 32), ("src_node_id", 5), ("dst_node_id", 5), ("run_id", 5), ("group_id", "9"),
        ("message_type", "evaluate"), ("ttl", 5.0), ("created_at", 5.0), ("message_id", "ab" * 32), ("src_task_id", 5),
        ("dst_task_id", 5),
    ],
)  # fmt: skip
def test_the_message_holds_what_was_announced(field: str, value: object) -> None:
    """The ServerApp believes the object: what Flower checked is what stands beside it."""
    reply = make_reply()
    inner = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
    setattr(inner.metadata, field, value)
    changed, id_ = with_body("Message", inner.SerializeToString(), reply)
    assert why_not(changed, id_) is RefusalReason.ROOT


def test_the_message_holds_nothing_else() -> None:
    reply = make_reply()
    body = split(reply.objects[reply.root])[2]
    inner = ProtoMessage.FromString(body)
    with_error, with_content = ProtoMessage(), ProtoMessage()
    with_error.CopyFrom(inner)
    with_error.error.code = 2
    with_content.CopyFrom(inner)
    with_content.content.SetInParent()
    bodies = [
        with_error.SerializeToString(), with_content.SerializeToString(), b"", b"\xff" * 5, body + b"\xfa\x7f\x01a",
        body + body, body[:-1],
    ]  # fmt: skip
    for other in bodies:
        changed, id_ = with_body("Message", other, reply)
        assert why_not(changed, id_) is RefusalReason.ROOT, other


def test_the_error_is_the_announced_one() -> None:
    reply = make_reply(Error(2, "why"))
    inner = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
    inner.error.reason = "another"
    changed, id_ = with_body("Message", inner.SerializeToString(), reply)
    assert why_not(changed, id_) is RefusalReason.ROOT


@pytest.mark.parametrize(
    "change",
    [
        {"arraychunk_ids": [0] * 2400}, {"arraychunk_ids": []}, {"arraychunk_ids": [1]}, {"arraychunk_ids": [False]},
        {"arraychunk_ids": [0.0]}, {"arraychunk_ids": 0}, {"dtype": "float32"}, {"stype": "numpy.ndarray"},
        {"shape": []}, {"shape": [0]}, {"shape": [-1]}, {"shape": [True]}, {"shape": [5.0]}, {"shape": [1 << 40]},
        {"shape": [1, 1000]}, {"shape": "x"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_array_is_one_slice(change: dict) -> None:
    """One that named its slice 2,400 times became 3.1 GB in the ServerApp."""
    changed, id_ = with_body("Array", json_body({**body_of("Array"), **change}))
    expected = RefusalReason.BODY_SIZE if len(str(change)) > 500 else RefusalReason.BODY
    assert why_not(changed, id_) is expected


def test_a_short_list_of_repeated_slices_is_refused_too() -> None:
    changed, id_ = with_body("Array", json_body({**body_of("Array"), "arraychunk_ids": [0, 0]}))
    assert why_not(changed, id_) is RefusalReason.BODY


@pytest.mark.parametrize("type_", ["Array", "ArrayRecord", "RecordDict"])
@pytest.mark.parametrize(
    "body", [b"", b"[", b"[" * 500, b"{}", b"[]", b"null", b'{"a": 1, "a": 1}', b"\xff", b"{" * 500]
)
def test_json_is_one_object_without_a_key_twice(type_: str, body: bytes) -> None:
    changed, id_ = with_body(type_, body)
    assert why_not(changed, id_) is RefusalReason.BODY


def test_no_key_stands_twice_in_what_is_right_otherwise() -> None:
    """Flower's reader takes the last, another one the first."""
    reply, body = make_reply(), json_body(body_of("Array"))
    assert check_again("Array", body)
    assert not check_again("Array", b'{"dtype": "uint8", ' + body[1:])
    record = split(reply.objects[reply.of_type("ConfigRecord")])[2]
    assert check_again("ConfigRecord", record)
    assert not check_again("ConfigRecord", record * 2)


def check_again(type_: str, body: bytes) -> bool:
    """Whether an object of this type and body passes."""
    changed, id_ = with_body(type_, body)
    try:
        check_object(changed.announcement(), id_, changed.objects[id_])
    except FleetCallRefused:
        return False
    return True


def test_a_nested_body_of_60_kilobytes_is_refused() -> None:
    changed, id_ = with_body("RecordDict", b"[" * 60_000)
    assert why_not(changed, id_) is RefusalReason.BODY


def test_no_slice_is_named_more_often_than_the_largest_reply_has_room() -> None:
    slices = body_of("ArrayRecord")
    first = next(iter(slices.values()))
    for names in (
        {**slices, "000003": first}, {**slices, "x": first}, {"000000": first},
        {f"{i:06d}": first for i in range(600)} | slices, {"000000": first, "000001": [first]},
        {**slices, "000002": "ab" * 32},
    ):  # fmt: skip
        changed, id_ = with_body("ArrayRecord", json_body(names))
        assert why_not(changed, id_) is RefusalReason.BODY, names


def test_a_record_is_named_once() -> None:
    records = body_of("RecordDict")
    first = next(iter(records.values()))
    for names in ({**records, "again": first}, {"a": first}, {"": first, "x": first}, {"x" * 81: first, **records}):
        changed, id_ = with_body("RecordDict", json_body(names))
        assert why_not(changed, id_) is RefusalReason.BODY, names


@pytest.mark.parametrize("body", [b"\xff\xff", b"\n\x03\n\x01a" * 2, b"\n\x03\n\x01a"])
def test_a_config_record_is_one_that_flower_reads(body: bytes) -> None:
    changed, id_ = with_body("ConfigRecord", body)
    assert why_not(changed, id_) is RefusalReason.BODY


@pytest.mark.parametrize(
    "type_,most",
    [("ArrayChunk", SLICE_BYTES), ("Array", limits.MAX_ARRAY_BODY_BYTES), ("ConfigRecord", limits.MAX_BODY_BYTES),
     ("RecordDict", limits.MAX_BODY_BYTES), ("Message", limits.MAX_BODY_BYTES)],
)  # fmt: skip
def test_no_body_is_longer_than_its_type_needs(type_: str, most: int) -> None:
    changed, id_ = with_body(type_, b" " * (most + 1))
    assert why_not(changed, id_) is RefusalReason.BODY_SIZE


def test_an_array_record_of_a_gigabyte_fits() -> None:
    """Its head and body have 150 bytes a slice: 64 KiB are too few from 425 slices on."""
    count = 819
    ids = [object_id(str(i).encode()) for i in range(count)]
    body = json_body({f"{i:06d}": id_ for i, id_ in enumerate(ids)})
    assert limits.MAX_BODY_BYTES < 100 * count < len(body) + 65 * count
    assert len(body) <= limits.MAX_BODY_BYTES + limits.BODY_BYTES_OF_A_SLICE * count
