"""Keep a message, or a state between two rounds, in a memory-mapped file, so that unused fields need no memory.

The file has no name, so it disappears when the last reference to its bytes is gone or the process exits.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar, final

from torch import Tensor

from fedveil.contract.codec import Value, view_bytes
from fedveil.contract.param_spec import Weights
from fedveil.errors import StateError

LEAST_BYTES = 16 << 20  # shorter messages stay in memory
_ALIGNED = 64  # alignment in bytes, the same as for torch's own tensors
_Kind = TypeVar("_Kind", bound=Value)


def allocate(folder: Path, size: int) -> mmap.mmap | bytearray:
    """Allocate space for a message of `size` bytes: a file in `folder`, or memory if it is short.

    Raises:
        StateError: the disk has too little free space. Without this check, the process would crash later.
    """
    if size < LEAST_BYTES:
        return bytearray(size)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise StateError(f"{folder}: no space for a message of {size} bytes: {error}; free some disk space") from error


def mmap_weights(tensors: Weights, folder: Path) -> Weights:
    """Return the same values, stored in a file in `folder`; small tensors and tensors not on the CPU are unchanged.

    Raises:
        StateError: the disk has too little free space.
    """
    sizes = {name: -(-t.numel() * t.itemsize // _ALIGNED) * _ALIGNED for name, t in tensors.items()}
    total = sum(sizes.values())
    if total < LEAST_BYTES or any(t.device.type != "cpu" for t in tensors.values()):
        return tensors
    file = allocate(folder, total)
    assert isinstance(file, mmap.mmap)
    whole, start, views = memoryview(file), 0, dict[str, Tensor]()
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        views[name] = view_bytes(whole[start : start + size], tensor.dtype, tuple(tensor.shape))
        if size:
            views[name].copy_(tensor)
        start += sizes[name]
    return MmapTensors(views, file)


def evict(tensors: Mapping[str, Value]) -> None:
    """Release the memory of the pages read so far, if the tensors are in a file."""
    if isinstance(tensors, MmapTensors):
        tensors.leave()


@final
class MmapTensors(Mapping[str, _Kind]):
    """Fields that are views of a file's bytes. Each access releases the pages read for other fields."""

    def __init__(self, fields: Mapping[str, _Kind], file: mmap.mmap) -> None:
        self._fields, self._file = fields, file
        self.leave()

    def leave(self) -> None:
        """Release the memory of all pages that were read; every byte stays in the file."""
        self._file.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> _Kind:
        self.leave()
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
