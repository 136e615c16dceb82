from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.wire.chunking import drain_parts, fill_slices, order_slices, slice_key, slice_message


@given(parts=st.lists(st.binary(max_size=40), max_size=8), size=st.integers(1, 33))
def test_slices_of_any_parts_are_their_bytes_in_order(parts, size):
    whole = b"".join(parts)
    slices = list(slice_message(parts, size))
    assert b"".join(slices) == whole == bytes(fill_slices(bytearray(len(whole)), slices))
    assert all(len(part) == size for part in slices[:-1])
    assert all(0 < len(part) <= size for part in slices[-1:])
    assert len(slices) == -(-len(whole) // size)


def test_views_of_other_element_types_are_cut_by_the_byte():
    numbers = np.arange(5, dtype="<u4")
    assert b"".join(slice_message([memoryview(numbers)], 3)) == numbers.tobytes()


@pytest.mark.parametrize("total", [0, 5, 7])
def test_slices_that_are_too_few_or_too_many_bytes_are_refused(total):
    with pytest.raises(WireError, match=f"its slices do not add up to {total} bytes"):
        fill_slices(bytearray(total), [b"abc", b"def"])


def test_drained_parts_are_not_held():
    class Part(bytearray):
        pass

    parts = [Part(b"a"), Part(b"b")]
    first = weakref.ref(parts[0])
    handed = drain_parts(parts)
    assert next(handed) == b"a"
    assert next(handed) == b"b"
    assert first() is None


@pytest.mark.parametrize("names", [[], ["000001"], ["000000", "000002"], ["message"], ["000000", "x"]])
def test_a_record_that_is_not_slices_is_refused(names):
    with pytest.raises(WireError, match="expected slices 000000, 000001"):
        order_slices(names)


def test_slices_are_put_in_order():
    assert order_slices([slice_key(2), slice_key(0), slice_key(1)]) == ["000000", "000001", "000002"]
