from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.errors import StateError, WireError
from fedveil.records.tensor_state import state_digest
from fedveil.wire import chunking, mmap_tensors
from fedveil.wire.dense import DenseCodec
from fedveil.wire.envelope import EnvelopeStamp, pack_message, unpack_message

LAYOUT = MessageLayout(tuple(WireField(n, "up", DenseCodec(), (2_500_000,)) for n in "abc"))
STAMP = EnvelopeStamp("m", 1, 0, "up")


def file_mb() -> float:
    """Resident memory of this process that a file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1e3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fields_of_a_message_in_a_file_leave_memory_when_another_is_read(tmp_path):
    tensors = {n: torch.randn(2_500_000, generator=torch.Generator().manual_seed(i)) for i, n in enumerate("abc")}
    data = pack_message(LAYOUT, STAMP, Payload(tensors), 5)
    message = chunking.fill_slices(mmap_tensors.allocate(tmp_path, len(data)), chunking.slice_message([data]))
    assert isinstance(message, mmap.mmap)
    assert list(tmp_path.iterdir()) == []
    before = file_mb()  # with the 30 MB of the message
    unpacked_message = unpack_message(message, LAYOUT, STAMP)
    assert state_digest(unpacked_message.payload.fields) == state_digest(tensors)
    assert unpacked_message.norms == unpack_message(data, LAYOUT, STAMP).norms
    del message
    float(unpacked_message.payload.fields["a"].sum())
    float(unpacked_message.payload.fields["b"].sum())
    assert file_mb() < before - 15  # one field of 10 MB
    assert all(torch.equal(unpacked_message.payload.fields[n], t) for n, t in tensors.items())
    assert (list(unpacked_message.payload.fields), len(unpacked_message.payload.fields)) == (list("abc"), 3)


def test_a_short_message_stays_in_memory_and_a_full_disk_is_named(tmp_path, monkeypatch):
    assert mmap_tensors.allocate(tmp_path, 100) == bytearray(100)
    with pytest.raises(WireError, match="slices do not add up to 100 bytes"):
        chunking.fill_slices(mmap_tensors.allocate(tmp_path, 100), [bytes(99)])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateError, match="no space for a message of 16777216 bytes"):
        mmap_tensors.allocate(tmp_path, mmap_tensors.LEAST_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_in_a_file_are_the_same_and_take_no_memory_between_two_reads(tmp_path):
    tensors = {n: torch.randn(999, 2501, generator=torch.Generator().manual_seed(i)) for i, n in enumerate("abc")}
    tensors |= {"turned": tensors["a"].T, "none": torch.empty(0, 3), "half": torch.ones(3, dtype=torch.float16)}
    mapped_weights = mmap_tensors.mmap_weights(tensors, tmp_path)
    assert list(mapped_weights) == list(tensors)
    assert state_digest(mapped_weights) == state_digest(tensors)
    assert all(mapped_weights[n].data_ptr() % 64 == 0 for n in "abc")
    whole = sum(float(t.sum()) for t in dict(mapped_weights).values() if t.numel())
    before = file_mb()
    mmap_tensors.evict(mapped_weights)
    assert file_mb() < before - 30
    assert sum(float(mapped_weights[n].sum()) for n in mapped_weights if tensors[n].numel()) == whole
    assert mmap_tensors.mmap_weights({"a": tensors["none"]}, tmp_path)["a"] is tensors["none"]
    assert list(tmp_path.iterdir()) == []
