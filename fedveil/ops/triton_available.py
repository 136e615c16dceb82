"""Check that the GPU kernels work on this machine.

Triton comes with torch's CUDA build and compiles kernels on first use. For that, it needs a C compiler and a
writable folder. If this fails, torch's own operations compute the same bits on the same device, about
ten times slower.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("fedveil")


class Kernels(Protocol):
    """The interface of `fedveil.ops.triton_kernels`, so that mypy can check calls to a module that may be missing."""

    def draw_mask(self, states: Tensor, first: int, rest: int, count: int, /) -> Tensor:
        """Draw a mask as `chacha20.decide_bits` does."""
        ...

    def pack_masked(self, values: Tensor, mask: Tensor, /) -> Tensor:
        """Pack flat integers as `random_masks.pack_masked` does."""
        ...

    def unpack_masked(self, values: Tensor, mask: Tensor, ends: Tensor, /) -> Tensor:
        """Unpack flat integers as `random_masks.unpack_masked` does; `ends` comes from `count_masked`."""
        ...

    def count_masked(self, mask: Tensor, /) -> tuple[Tensor, int]:
        """Return the running count of ones after each program's entries, and the total."""
        ...

    def quantize_blocks(
        self, flat: Tensor, block: int, half: int, middles: tuple[float, ...], /
    ) -> tuple[Tensor, Tensor]:
        """Return a flat tensor's codes and scales."""
        ...


def load_kernels(device: torch.device) -> Kernels | None:
    """Return `fedveil.ops.triton_kernels` if `device` can run them, else None; a failure on a GPU is logged once."""
    return _tried(device) if device.type == "cuda" else None


@cache
def _tried(device: torch.device) -> Kernels | None:
    try:  # only compiling shows whether the compiler, headers and Triton are installed and work together
        from fedveil.ops import triton_kernels

        triton_kernels.self_test(device)
    except Exception as error:  # the part of the compiler that fails may raise any exception
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        log.warning(
            "GPU kernels: Triton or the C compiler does not work here (%s); torch computes the same, more slowly",
            reason,
        )  # fmt: skip
        return None
    return triton_kernels
