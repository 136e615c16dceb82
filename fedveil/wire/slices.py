"""A message in slices, so that no process on its way has to hold a second whole copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING

from fedveil.errors import WireError

if TYPE_CHECKING:
    from fedveil.contract.codec import Buffer  # not at run time: the client's thin process must not import torch

# Below Flower's own unit of transport (5 MB), so that Flower does not cut an array again; above the threshold
# (MALLOC_MMAP_THRESHOLD_ in console/flower/processes.py) from which freed memory goes back to the system.
SLICE_BYTES = 5 << 18
STYPE = "fedveil.slice/1"


def name(index: int) -> str:
    """The key of a slice in Flower's record."""
    return f"{index:06d}"


def sliced(parts: Iterable[Buffer], size: int = SLICE_BYTES) -> Iterator[bytes]:
    """The bytes of all parts in slices of `size`; the last one may be shorter. Reads one part at a time."""
    pending = bytearray()
    for part in parts:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while len(view):
            room = size - len(pending)
            pending += view[:room]
            view = view[room:]
            if len(pending) == size:
                yield bytes(pending)
                pending.clear()
    if pending:
        yield bytes(pending)


def drained(parts: list[Buffer]) -> Iterator[Buffer]:
    """Each part in turn, removed from the list before it is handed out."""
    parts.reverse()
    while parts:
        yield parts.pop()


def gathered(slices: Iterable[Buffer], total: int) -> bytearray:
    """The whole message. Raises WireError unless the slices have `total` bytes together."""
    whole = bytearray(total)
    filled(whole, slices)
    return whole


def filled(whole: bytearray | mmap, slices: Iterable[Buffer]) -> bytearray | mmap:
    """`whole`, with the slices in it. Raises WireError unless they fill it."""
    total, start = len(whole), 0
    for part in slices:
        end = start + len(part)
        if end > total:
            break
        whole[start:end] = part
        start = end
    else:
        if start == total:
            return whole
    raise WireError(f"message: expected slices of {total} bytes together, found another sum")


def in_order(names: Sequence[str]) -> list[str]:
    """Keys of a record, in the order of their slices. Raises WireError unless they are slices 0, 1, 2, ..."""
    found = sorted(names)
    if not found or found != [name(i) for i in range(len(found))]:
        raise WireError(f"message: expected slices {name(0)}, {name(1)}, ..., found {found[:4] or 'none'}")
    return found
