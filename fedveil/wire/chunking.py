"""Split a message into slices, so that no process that forwards the message needs a second full copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING

from fedveil.errors import WireError

if TYPE_CHECKING:
    from fedveil.contract.codec import Buffer  # not at run time: the client's thin process must not import torch

# Below Flower's own chunk size (5 MB), so that Flower does not split an array again; above the threshold
# (MALLOC_MMAP_THRESHOLD_ in fedveil/console/flower/processes.py) beyond which freed memory goes back to the system.
SLICE_BYTES = 5 << 18
# The server's fleet port refuses replies with more slices: Flower announces two objects per slice, and an announcement
# of more than 4,096 objects keeps its database locked for longer than 3 s (fedveil/guard/fleet_limits.py).
MAX_REPLY_SLICES = 2040
STYPE = "fedveil.slice/1"


def slice_key(index: int) -> str:
    """Return the key of a slice in Flower's record."""
    return f"{index:06d}"


def slice_message(parts: Iterable[Buffer], size: int = SLICE_BYTES) -> Iterator[bytes]:
    """Yield the bytes of all parts in slices of `size`; the last slice may be shorter. Read one part at a time."""
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


def drain_parts(parts: list[Buffer]) -> Iterator[Buffer]:
    """Yield each part in turn, after removing it from the list."""
    parts.reverse()
    while parts:
        yield parts.pop()


def fill_slices(whole: bytearray | mmap, slices: Iterable[Buffer]) -> bytearray | mmap:
    """Copy the slices into `whole` and return it. Raises WireError unless they fill it exactly."""
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
    raise WireError(f"message: its slices do not add up to {total} bytes")


def order_slices(names: Sequence[str]) -> list[str]:
    """Sort a record's keys by slice number. Raises WireError unless they are slices 0, 1, 2, ..."""
    keys = sorted(names)
    if not keys or keys != [slice_key(i) for i in range(len(keys))]:
        raise WireError(f"message: expected slices {slice_key(0)}, {slice_key(1)}, ..., found {keys[:4] or 'none'}")
    return keys
