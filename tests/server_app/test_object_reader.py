"""The strict reader of a reply's objects: honest replies, each fault by name, and anything at all.

Slices are of 64 bytes here, so that a reply of many is small.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from mmap import mmap

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.server_app.object_reader import IncompleteReplyError, LostObjectError, ObjectReader
from fedveil.server_app.reply_content import ReplyContent, ReplyError
from fedveil.wire import chunking, flower_objects, mmap_tensors
from tests.fedveil.guard.fleet.replies import Reply, exchange_object, json_body, make_reply, object_bytes, split

SLICE = 64
HEAD = "7:" + "a" * 64
PROPERTY = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch):
    monkeypatch.setattr(chunking, "SLICE_BYTES", SLICE)


def upload(data: bytes, **log: object) -> Reply:
    """An honest reply with these bytes."""
    parts = enumerate(chunking.slice_message([data], SLICE))
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in parts}
    records = {"fedveil": ArrayRecord(arrays), "log": ConfigRecord({"head": HEAD} | log)}
    return make_reply(RecordDict(records))


class Reading:
    """Reads a reply; counts the pulls of each object."""

    def __init__(self, reply: Reply, max_bytes: int = 1000, folder=None) -> None:
        self.reply, self.pulls = reply, Counter[str]()
        self.reader = ObjectReader(self.pull, max_bytes, folder)

    def pull(self, object_id: str) -> bytes:
        self.pulls[object_id] += 1
        if object_id not in self.reply.objects:
            raise LostObjectError("lost")
        return self.reply.objects[object_id]

    def read(self) -> ReplyContent | ReplyError:
        return self.reader.read_content(self.reply.request.messages_list[0])


def why_refused(reply: Reply, max_bytes: int = 1000) -> str:
    with pytest.raises(WireError) as why:
        Reading(reply, max_bytes).read()
    return str(why.value)


def with_body(reply: Reply, type_: str, body: bytes) -> Reply:
    old = reply.of_type(type_)
    return exchange_object(reply, old, object_bytes(type_, split(reply.objects[old])[1], body))


@PROPERTY
@given(st.binary(min_size=1, max_size=900))
def test_an_honest_reply_is_read_as_it_was_sent_and_each_object_once(data):
    reading = Reading(upload(data))
    assert reading.read() == ReplyContent(data, HEAD)
    assert reading.reader.received_bytes == len(data)
    assert reading.pulls == Counter(reading.reply.objects.keys())


@pytest.mark.parametrize("size", [1, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE, 15 * SLICE])
def test_equal_slices_are_pulled_once(size):
    reading = Reading(upload(b"\0" * size))
    assert reading.read() == ReplyContent(b"\0" * size, HEAD)
    assert set(reading.pulls.values()) == {1}


def test_a_long_upload_is_read_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap_tensors, "LEAST_BYTES", 300)
    content = Reading(upload(b"x" * 301), folder=tmp_path).read()
    assert isinstance(content, ReplyContent)
    assert isinstance(content.data, mmap)
    assert content.data[:] == b"x" * 301


def test_an_error_has_no_other_object():
    assert Reading(make_reply(Error(2, "why"))).read() == ReplyError(2, "why")


@pytest.mark.parametrize("head", [b"\0" * 80, 7, [1.5], True, "1:x"])
def test_a_log_of_another_kind_does_no_harm(head):
    assert Reading(upload(b"abc", head=head)).read() == ReplyContent(b"abc", "")


def test_more_bytes_than_the_largest_reply_are_refused_before_a_slice_is_pulled():
    reading = Reading(upload(bytes(range(200))), 199)
    with pytest.raises(WireError, match="its 200 bytes exceed the 199 that the run's layout allows"):
        reading.read()
    assert not any(reading.reply.objects[id_].startswith(b"ArrayChunk") for id_ in reading.pulls)


def test_an_array_that_repeats_its_chunk_is_refused():
    reply = upload(b"abc")
    body = json.loads(split(reply.objects[reply.of_type("Array")])[2])
    for change in ({"arraychunk_ids": [0, 0]}, {"shape": [6]}, {"shape": [2]}):
        assert why_refused(with_body(reply, "Array", json_body(body | change))).startswith("reply: an object of type")


def test_an_array_of_more_than_one_chunk_is_refused_before_any_is_pulled():
    reply = upload(b"abc")
    old = reply.of_type("Array")
    _, children, body = split(reply.objects[old])
    reading = Reading(exchange_object(reply, old, object_bytes("Array", [*children, "ab" * 32], body)))
    with pytest.raises(WireError, match="reply: an object of type .* has the wrong children"):
        reading.read()
    assert not any(reading.reply.objects.get(id_, b"").startswith(b"ArrayChunk") for id_ in reading.pulls)


def test_only_the_last_slice_may_be_short():
    reply = upload(b"a" * SLICE + b"b" * 3)
    record = reply.of_type("ArrayRecord")
    _, children, body = split(reply.objects[record])
    first, last = json.loads(body).values()
    for order in ({"000000": last, "000001": first}, {"000000": last, "000001": last, "000002": first}):
        changed = exchange_object(reply, record, object_bytes("ArrayRecord", children, json_body(order)))
        assert why_refused(changed) == f"reply: a slice before the last has 3 bytes instead of {SLICE}"


@pytest.mark.parametrize("names", [["000001"], ["000000", "000000x"], ["000001", "000000"], ["x"], []])
def test_slices_are_named_in_order(names):
    reply = upload(b"abc")
    record = reply.of_type("ArrayRecord")
    _, children, body = split(reply.objects[record])
    content = object_bytes("ArrayRecord", children, json_body(dict.fromkeys(names, json.loads(body)["000000"])))
    assert "ArrayRecord" in why_refused(exchange_object(reply, record, content))


def test_a_reply_has_the_records_of_an_upload_and_no_other():
    arrays = ArrayRecord({"000000": Array("uint8", (1,), chunking.STYPE, b"x")})
    for records, found in (
        ({"log": ConfigRecord()}, "['log']"),
        ({"fedveil": arrays, "more": ConfigRecord()}, "['fedveil', 'more']"),
    ):
        assert why_refused(make_reply(RecordDict(records))).endswith(f"optionally log and signature, found {found}")
    assert "ArrayRecord" in why_refused(make_reply(RecordDict({"fedveil": ConfigRecord()})))
    log = ArrayRecord({"000000": Array("uint8", (1,), chunking.STYPE, b"y")})
    for name in ("log", "signature"):
        assert "ConfigRecord" in why_refused(make_reply(RecordDict({"fedveil": arrays, name: log})))


@pytest.mark.parametrize(
    "body", [b"\xff\xff", b"\n\x03\n\x01a", b"\xfa\x7f\x01a", None], ids=["bytes", "no value", "unknown", "twice"]
)
def test_a_log_record_has_one_form(body):
    reply = upload(b"abc")
    body = split(reply.objects[reply.of_type("ConfigRecord")])[2] * 2 if body is None else body
    assert "ConfigRecord" in why_refused(with_body(reply, "ConfigRecord", body))


def test_an_object_has_the_hash_that_names_it():
    reply = upload(b"abc")
    for id_ in list(reply.objects):
        wrong = Reply(reply.request, reply.objects | {id_: reply.objects[id_] + b"x"})
        assert why_refused(wrong) == "reply: an object does not have the hash that names it"


def test_objects_that_are_not_there_are_no_fault_of_form():
    reply = upload(b"abc")
    for id_ in list(reply.objects):
        for error in (LostObjectError, IncompleteReplyError):
            reading = Reading(reply)

            def pull(object_id: str, id_=id_, error=error) -> bytes:
                if object_id == id_:
                    raise error("gone")
                return reply.objects[object_id]

            reading.reader._pull = pull
            with pytest.raises(error):
                reading.read()


def test_what_ends_a_pull_ends_the_reading_of_many_slices():
    reading = Reading(upload(bytes(range(200))))
    chunks = {id_ for id_, content in reading.reply.objects.items() if content.startswith(b"ArrayChunk")}

    def pull(object_id: str) -> bytes:
        if object_id in chunks:
            raise KeyboardInterrupt
        return reading.reply.objects[object_id]

    reading.reader._pull = pull
    with pytest.raises(KeyboardInterrupt):
        reading.read()


# Anything at all

TYPES = [*(kind.value for kind in flower_objects.ObjectType), "MetricRecord", "x"]
UPWARDS = ["ArrayChunk", "Array", "ArrayRecord", "ConfigRecord", "RecordDict", "Message"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@PROPERTY
@given(st.data())
def test_a_reply_with_one_object_changed_is_refused_or_is_no_larger(data):
    reply = upload(data.draw(st.binary(min_size=1, max_size=300)))
    old = data.draw(st.sampled_from(upwards(reply)))
    type_, children, body = split(reply.objects[old])
    match data.draw(st.sampled_from(["type", "children", "body", "bytes", "json"])):
        case "type":
            new = object_bytes(data.draw(st.sampled_from(TYPES)), children, body)
        case "children":
            ids = st.lists(st.sampled_from([*upwards(reply), "ab" * 32]), max_size=4)
            new = object_bytes(type_, data.draw(ids), body)
        case "body":
            start, end = sorted(data.draw(st.tuples(st.integers(0, len(body)), st.integers(0, len(body)))))
            new = object_bytes(type_, children, body[:start] + data.draw(st.binary(max_size=90)) + body[end:])
        case "json":
            new = object_bytes(type_, children, json.dumps(data.draw(JSON)).encode())
        case _:
            new = data.draw(st.binary(max_size=90))
    require_bounded(Reading(with_object(reply, old, new)))


@PROPERTY
@given(st.data())
def test_any_graph_of_objects_is_refused_or_is_no_larger(data):
    """Each object names children among those before it, so that a root has all of them below it."""
    honest = upload(b"x" * 100)
    objects = {id_: honest.objects[id_] for id_ in upwards(honest)}
    for _ in range(data.draw(st.integers(1, 8))):
        ids = data.draw(st.lists(st.sampled_from(list(objects)), max_size=3))
        names = dict(
            zip(data.draw(st.lists(st.sampled_from(["fedveil", "log", "000000", "000001"]))), ids, strict=False)
        )
        body = data.draw(st.sampled_from([json_body(names), split(honest.objects[honest.root])[2], b"y" * SLICE]))
        content = object_bytes(data.draw(st.sampled_from(TYPES)), ids, body)
        objects[hashlib.sha256(content).hexdigest()] = content
    announced = ProtoMessage()
    announced.CopyFrom(honest.request.messages_list[0])
    announced.metadata.message_id = data.draw(st.sampled_from(list(objects)))
    reading = Reading(Reply(honest.request, objects))
    reading.reply.request.messages_list[0].CopyFrom(announced)
    require_bounded(reading)


def upwards(reply: Reply) -> list[str]:
    """The ids of an honest reply's objects, each after its children. The root's is another each time."""
    return sorted(reply.objects, key=lambda id_: (UPWARDS.index(split(reply.objects[id_])[0]), id_))


def with_object(reply: Reply, old: str, new: bytes) -> Reply:
    """The reply with another object in one's place, whatever it is."""
    objects, renamed = dict(reply.objects), {old: hashlib.sha256(new).hexdigest()}
    del objects[old]
    for id_ in [id_ for id_ in upwards(reply) if id_ != old]:
        after = content = objects[id_]
        for name, new_name in renamed.items():
            after = after.replace(name.encode(), new_name.encode())
        if after != content:
            renamed[id_] = hashlib.sha256(after).hexdigest()
            del objects[id_]
            objects[renamed[id_]] = after
    objects[renamed[old]] = new
    reply.request.messages_list[0].metadata.message_id = renamed.get(reply.root, reply.root)
    return Reply(reply.request, objects)


def require_bounded(reading: Reading, max_bytes: int = 1000) -> None:
    try:
        content = reading.read()
    except WireError:
        content = None
    if isinstance(content, ReplyContent):
        assert len(content.data) <= max_bytes
    assert sum(reading.pulls.values()) <= 5 + 2 * flower_objects.max_slices(max_bytes)
