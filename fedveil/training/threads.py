"""The number of threads that compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedveil.config import RunConfig


@contextlib.contextmanager
def limit_threads(config: RunConfig) -> Iterator[None]:
    """One thread inside under run.deterministic: how a sum is split over threads shows in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if config.run.deterministic else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
