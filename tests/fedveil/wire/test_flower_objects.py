"""Flower's objects as bytes: what its own classes write is read, and anything else raises one error."""

from __future__ import annotations

import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.wire import chunking, flower_objects
from fedveil.wire.flower_objects import FlowerObject, ObjectFault, ObjectFormError, ObjectType, parse_object

READERS = {
    ObjectType.RECORD_DICT: flower_objects.read_record_dict,
    ObjectType.ARRAY_RECORD: lambda read: flower_objects.read_array_record(read, 10),
    ObjectType.ARRAY: flower_objects.read_array,
}


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5))
def test_what_flower_writes_is_read(parts):
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in enumerate(parts)}
    content = RecordDict({"fedveil": ArrayRecord(arrays), "log": ConfigRecord({"head": "x"})})
    objects = {id_: part.deflate() for id_, part in get_all_nested_objects(content).items()}
    read = {id_: parse_object(data, ObjectType(data.split(b" ")[0].decode()), 10) for id_, data in objects.items()}
    records = flower_objects.read_record_dict(read[content.object_id])
    assert list(records) == ["fedveil", "log"]
    slices = [read[id_] for id_ in flower_objects.read_array_record(read[records["fedveil"]], 10)]
    assert [flower_objects.read_array(array) for array in slices] == [len(part) for part in parts]
    assert [bytes(read[array.children[0]].body) for array in slices] == parts


@settings(deadline=None)
@given(st.data())
def test_any_bytes_raise_one_error_or_are_an_object(data):
    type_ = data.draw(st.sampled_from(ObjectType))
    children = data.draw(st.lists(st.sampled_from(["ab" * 32, "cd" * 32, "", "x", "AB" * 32]), max_size=3))
    body = data.draw(
        st.binary(max_size=40) | st.just(json.dumps(dict.fromkeys(["000000", "000001"], "ab" * 32)).encode())
    )
    length = data.draw(st.sampled_from([len(body), len(body), len(body), len(body) + 1, -1]))
    name = data.draw(st.sampled_from([type_.value, type_.value, "Other", ""]))
    content = data.draw(
        st.binary(max_size=40) | st.just(f"{name} {','.join(children)} {length}".encode() + b"\0" + body)
    )
    try:
        read = parse_object(content, type_, 10)
        READERS.get(type_, bytes)(read if type_ in READERS else read.body)
    except ObjectFormError:
        return
    assert isinstance(read, FlowerObject)
    assert len(set(read.children)) == len(read.children)


@pytest.mark.parametrize("type_", ObjectType)
def test_a_body_has_the_bytes_of_its_type_at_most(type_):
    body = b"x" * (chunking.SLICE_BYTES + 1)
    with pytest.raises(ObjectFormError) as why:
        parse_object(f"{type_.value}  {len(body)}".encode() + b"\0" + body, type_, 10)
    assert why.value.fault is ObjectFault.BODY_SIZE
