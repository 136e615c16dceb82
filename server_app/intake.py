"""The gate that every upload passes before it may touch the aggregate.

The envelope has already checked names, codecs, dtypes, shapes, sizes and checksums against the layout. Here follow the
values: how much the upload may weigh, and whether its numbers are numbers.

| upload | refused with |
|---|---|
| num_examples of 0, -1, NaN, 1e12, 3.5, "7" | "num_examples: expected a whole number from 1 to ..." |
| a NaN or Inf anywhere in a dense field | "<field>: expected finite values, found ..." |
| a finite field whose squares overflow | accepted below `max_norm`; refused above it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import UploadRefused
from fedveil.wire.codec import Coded
from fedveil.wire.envelope import Message


@dataclass(frozen=True)
class Limits:
    """What an upload may be.

    Attributes:
        max_examples: examples that one site may claim.
        max_norm: Euclidean norm of one field's values.
    """

    max_examples: int = 100_000_000
    max_norm: float = 1e6


def check(message: Message, limits: Limits) -> int:
    """Returns num_examples of an upload that may be folded. Raises UploadRefused with field, expected and found."""
    n = message.num_examples
    if type(n) is not int or not 1 <= n <= limits.max_examples:
        raise UploadRefused(f"num_examples: expected a whole number from 1 to {limits.max_examples}, found {n!r}")
    for name, value in message.payload.fields.items():
        values = value.scales if isinstance(value, Coded) else value
        if isinstance(values, Tensor) and values.is_floating_point():
            _check_norm(name, values, limits.max_norm)
    return n


def _check_norm(name: str, values: Tensor, max_norm: float) -> None:
    """One pass in the common case: a norm is finite only if every value is."""
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float32))
    if not math.isfinite(norm):
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            first = int((~torch.isfinite(values)).flatten().nonzero()[0])
            raise UploadRefused(
                f"{name}: expected finite values, found {values.flatten()[first].item()} at entry {first} ({bad} in all)"
            )
    if norm > max_norm:
        raise UploadRefused(f"{name}: expected a norm of at most {max_norm:g}, found {norm:g}")
