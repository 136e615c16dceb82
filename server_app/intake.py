"""The gate that every upload passes before it enters the sums.

The envelope has already checked names, codecs, dtypes, shapes, sizes and checksums against the layout. The gate checks
the values: the weight that the upload claims, and whether the numbers that would be added are finite and not too large.

Dense fields are added as they are, or rearranged, so their norms of the envelope's pass count. Of an upload with codes
every term is decoded and judged by itself.

| upload | refused with |
|---|---|
| num_examples of 0, -1, NaN, 1e12, 3.5, "7" | "num_examples: expected a whole number from 1 to ..." |
| a NaN or Inf anywhere in a dense field | "<field>: expected finite values, found ..." |
| codes whose decoded values are too large | "<name>: expected a norm of at most ..., found ..." |
| a finite field whose squares overflow | accepted below `max_norm`; refused above it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedveil.contract.codec import Coded
from fedveil.contract.method import RoundContext, Upload
from fedveil.errors import UploadRefused
from fedveil.federation.exchange import Exchange
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
        _check_norm(name, norm, limits)
    return n


def judge(exchange: Exchange, message: Message, ctx: RoundContext, limits: Limits) -> tuple[Upload, float]:
    """An acceptable upload, in the server's own context, and the norm of all that it adds.

    Raises:
        UploadRefused: as `check` does.
    """
    upload = Upload(message.payload, check(message, limits), ctx, message.report)
    fields, norms = message.payload.fields, dict(message.norms)
    if any(isinstance(value, Coded) for value in fields.values()):
        for term in exchange.terms(upload).tensors:
            if term.value is not fields.get(term.name):
                norms[term.name] = float(torch.linalg.vector_norm(term.value, dtype=torch.float64))
                _check_norm(term.name, norms[term.name], limits)
    return upload, math.hypot(*norms.values())


def _check_norm(name: str, norm: float, limits: Limits) -> None:
    if not norm <= limits.max_norm:
        raise UploadRefused(f"{name}: expected a norm of at most {limits.max_norm:g}, found {norm:g}")


def _check_finite(name: str, values: Tensor) -> None:
    bad = (~torch.isfinite(values)).flatten().nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        found = f"{values.flatten()[first].item()} at entry {first} ({len(bad)} in all)"
        raise UploadRefused(f"{name}: expected finite values, found {found}")
