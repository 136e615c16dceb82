"""Exchange tensors between ranks with torch.distributed: NCCL between GPUs, gloo between CPUs.

The ranks find each other through a file in a folder that only the site's user can enter, and communicate only over the
loopback interface. While a rank waits for a sum, it also checks that the others are still alive.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedveil.errors import RankError

_BUCKET_BYTES = 32 << 20  # bytes per transfer: sending a small tensor costs as much as sending a larger one
_LOOK_SECONDS = 0.0002
_LOST_SECONDS = 5.0  # a connection breaks before the exit of its process can be detected
_MOST = timedelta(days=30)  # the time limit in an instruction ends a round earlier


@final
class RankGroup:
    """The group of all ranks, as seen by this rank.

    Args:
        store: a file, not yet existing, that all ranks agree on.
        device: the device of all tensors.
        check: raises RankError if another rank is gone.
    """

    def __init__(self, store: Path, rank: int, size: int, device: torch.device, check: Callable[[], None]) -> None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        backend = "nccl" if device.type == "cuda" else "gloo"
        where = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=where, rank=rank, world_size=size, timeout=_MOST)
        self.size, self.rank, self._check = size, rank, check

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's values to all ranks, in place."""
        for bucket in _buckets(tensors):
            flat = _joined(bucket)
            self._wait(dist.broadcast(flat, 0, async_op=True))
            if self.rank:
                _into(bucket, flat)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Reduce the sum over all ranks to rank 0, in place; the other ranks' values are undefined afterwards."""
        for bucket in _buckets(tensors):
            flat = _joined(bucket)
            self._wait(dist.reduce(flat, 0, async_op=True))
            if not self.rank:
                _into(bucket, flat)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the tensors to rank 0."""
        for tensor in tensors:
            self._waited(partial(dist.send, tensor.contiguous(), 0))

    def receive(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Receive the tensors of `rank` into contiguous tensors."""
        for tensor in tensors:
            self._waited(partial(dist.recv, tensor, rank))

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _wait(self, work: Any) -> None:
        def done() -> None:
            while not work.is_completed():
                self._check()
                time.sleep(_LOOK_SECONDS)
            work.wait()

        self._waited(done)

    def _waited(self, done: Callable[[], object]) -> None:
        try:
            done()
        except RuntimeError as error:  # a connection broke
            end = time.monotonic() + _LOST_SECONDS
            while time.monotonic() < end:
                self._check()
                time.sleep(0.05)
            raise RankError(f"processes: not every rank answered ({error}); see the worker's log") from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in ordered buckets of one dtype, each with one tensor or at most _BUCKET_BYTES."""
    bucket: list[Tensor] = []
    bucket_bytes = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or bucket_bytes + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(tensor)
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _joined(bucket: list[Tensor]) -> Tensor:
    """Return the tensors' values as one flat tensor; a single contiguous tensor is not copied."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


@torch.no_grad()
def _into(bucket: list[Tensor], flat: Tensor) -> None:
    if len(bucket) == 1 and bucket[0].data_ptr() == flat.data_ptr():
        return
    for tensor, part in zip(bucket, torch.split(flat, [math.prod(t.shape) for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
