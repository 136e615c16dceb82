"""The gate that every upload passes before it enters the sums.

The envelope has already checked names, codecs, dtypes, shapes, sizes and checksums against the layout. The gate checks
the values: the weight that the upload claims, and whether its numbers are finite and not too large.

| upload | refused with |
|---|---|
| num_examples of 0, -1, NaN, 1e12, 3.5, "7" | "num_examples: expected a whole number from 1 to ..." |
| a NaN or Inf anywhere in a dense field | "<field>: expected finite values, found ..." |
| a finite field whose squares overflow | accepted below `max_norm`; refused above it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedveil.contract.codec import Coded
from fedveil.errors import UploadRefused
from fedveil.wire.envelope import Message


@dataclass(frozen=True)
class Limits:
    """Bounds on an upload.

    Attributes:
        max_examples: examples that one site may claim.
        max_norm: Euclidean norm of one field's values.
    """

    max_examples: int = 100_000_000
    max_norm: float = 1e6


def check(message: Message, limits: Limits) -> int:
    """Returns num_examples of an acceptable upload. Raises UploadRefused with field, expected and found."""
    n = message.num_examples
    if type(n) is not int or not 1 <= n <= limits.max_examples:
        raise UploadRefused(f"num_examples: expected a whole number from 1 to {limits.max_examples}, found {n!r}")
    for name, norm in message.norms.items():
        if not math.isfinite(norm):
            _check_finite(name, cast(Tensor, message.payload.fields[name]))
        if not norm <= limits.max_norm:
            raise UploadRefused(f"{name}: expected a norm of at most {limits.max_norm:g}, found {norm:g}")
    for name, value in message.payload.fields.items():
        if isinstance(value, Coded):
            _check_finite(f"{name} (scales)", value.scales)
    return n


def _check_finite(name: str, values: Tensor) -> None:
    bad = (~torch.isfinite(values)).flatten().nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        found = f"{values.flatten()[first].item()} at entry {first} ({len(bad)} in all)"
        raise UploadRefused(f"{name}: expected finite values, found {found}")
