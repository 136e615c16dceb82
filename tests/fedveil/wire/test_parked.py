from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from fedveil.contract.layout import Field, Layout, Payload
from fedveil.errors import StateError, WireError
from fedveil.records.state import digest
from fedveil.wire import parked, slices
from fedveil.wire.dense import Dense
from fedveil.wire.envelope import Stamp, pack, unpack

LAYOUT = Layout(tuple(Field(n, "up", Dense(), (2_500_000,)) for n in "abc"))
STAMP = Stamp("m", 1, 0, "up")


def file_mb() -> float:
    """Resident memory of this process that a file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1e3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fields_of_a_message_in_a_file_leave_memory_when_another_is_read(tmp_path):
    tensors = {n: torch.randn(2_500_000, generator=torch.Generator().manual_seed(i)) for i, n in enumerate("abc")}
    data = pack(LAYOUT, STAMP, Payload(tensors), 5)
    message = slices.filled(parked.room(tmp_path, len(data)), slices.sliced([data]))
    assert isinstance(message, mmap.mmap)
    assert list(tmp_path.iterdir()) == []
    before = file_mb()  # with the 30 MB of the message
    found = unpack(message, LAYOUT, STAMP)
    assert digest(found.payload.fields) == digest(tensors)
    assert found.norms == unpack(data, LAYOUT, STAMP).norms
    del message
    float(found.payload.fields["a"].sum())
    float(found.payload.fields["b"].sum())
    assert file_mb() < before - 15  # one field of 10 MB
    assert all(torch.equal(found.payload.fields[n], t) for n, t in tensors.items())
    assert (list(found.payload.fields), len(found.payload.fields)) == (list("abc"), 3)


def test_a_short_message_stays_in_memory_and_a_full_disk_is_named(tmp_path, monkeypatch):
    assert parked.room(tmp_path, 100) == bytearray(100)
    with pytest.raises(WireError, match="slices of 100 bytes"):
        slices.filled(parked.room(tmp_path, 100), [bytes(99)])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateError, match="expected room for a message of 16777216 bytes"):
        parked.room(tmp_path, parked.LEAST_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_in_a_file_are_the_same_and_take_no_memory_between_two_reads(tmp_path):
    tensors = {n: torch.randn(999, 2501, generator=torch.Generator().manual_seed(i)) for i, n in enumerate("abc")}
    tensors |= {"turned": tensors["a"].T, "none": torch.empty(0, 3), "half": torch.ones(3, dtype=torch.float16)}
    found = parked.weights(tensors, tmp_path)
    assert list(found) == list(tensors)
    assert digest(found) == digest(tensors)
    assert all(found[n].data_ptr() % 64 == 0 for n in "abc")
    whole = sum(float(t.sum()) for t in dict(found).values() if t.numel())
    before = file_mb()
    parked.leave(found)
    assert file_mb() < before - 30
    assert sum(float(found[n].sum()) for n in found if tensors[n].numel()) == whole
    assert parked.weights({"a": tensors["none"]}, tmp_path)["a"] is tensors["none"]
    assert list(tmp_path.iterdir()) == []
