"""Digests of records and of messages in slices."""

from __future__ import annotations

import hashlib
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.federation.message_signatures.digests import digest_content, digest_record

VALUES = [
    True, 1, 1.0, "1", b"\x01", False, 0, -0.0, 0.0, "", b"", "01", b"\xab", "ab", 1.5, (1.5).hex(), 2**63 - 1,
    [], [1], [True], ["1"], [1.0], [b"\x01"], [1, 1], ["1", "1"], "[i", [""], [b""],
]  # fmt: skip


def test_no_two_values_of_a_record_have_one_digest():
    seen = [digest_record({"key": value}) for value in VALUES]
    equal = [(VALUES[i], VALUES[j]) for i, j in combinations(range(len(VALUES)), 2) if seen[i] == seen[j]]
    assert equal == []


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5), st.binary(max_size=5)), max_size=5
    )
)
def test_the_order_of_a_records_keys_does_not_matter(record):
    assert digest_record(dict(reversed(record.items()))) == digest_record(record)


def test_a_key_that_moves_changes_the_digest():
    assert digest_record({"a": "b", "c": "d"}) != digest_record({"a": "d", "c": "b"})
    assert digest_record({}) != digest_record({"": ""})


@pytest.mark.parametrize("value", [None, {"a": 1}, (1,), [1, "1"], [[1]], "\ud800"])
def test_a_value_that_no_record_has_is_refused(value):
    with pytest.raises(WireError, match="record"):
        digest_record({"key": value})


@given(st.binary(max_size=400), st.integers(1, 700))
def test_the_digest_of_slices_is_that_of_the_message_wherever_it_is_cut(data, size):
    slices = [data[i : i + size] for i in range(0, len(data), size)]
    assert digest_content(slices) == hashlib.sha256(data).hexdigest()
    assert digest_content([memoryview(bytearray(data))]) == digest_content(slices)


def test_a_changed_byte_changes_the_digest():
    assert digest_content([b"abc"]) != digest_content([b"abd"])
