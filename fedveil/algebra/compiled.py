"""Whether the kernels for GPUs work on this machine.

Triton comes with torch's build for CUDA and compiles at the first use, for which it needs a C compiler and a folder to
write to. Where that fails, torch's own operations compute the same bits on the same device, some ten times slower.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

log = logging.getLogger("fedveil")


def kernels(device: torch.device) -> ModuleType | None:
    """`fedveil.algebra.kernels` where `device` can run them; None elsewhere, which the log says once on a GPU."""
    return _tried(device) if device.type == "cuda" else None


@cache
def _tried(device: torch.device) -> ModuleType | None:
    try:  # a trial, because only a compilation shows whether compiler, headers and Triton are there and fit together
        from fedveil.algebra import kernels

        kernels.trial(device)
    except Exception as error:  # what the failing part of the compiler happens to raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        log.warning(
            "kernels for the GPU: expected Triton and a C compiler, found that they fail (%s); torch computes the same "
            "in more steps", reason
        )  # fmt: skip
        return None
    return kernels
