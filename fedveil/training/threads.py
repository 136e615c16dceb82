"""The number of compute threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fedveil.config import RunConfig


@contextlib.contextmanager
def limit_threads(config: RunConfig) -> Iterator[None]:
    """Use one thread under run.deterministic, because splitting a sum over threads affects its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if config.run.deterministic else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
