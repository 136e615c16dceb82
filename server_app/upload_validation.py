"""Validate every upload before it enters the sums.

The envelope has already checked names, codecs, dtypes, shapes, sizes and checksums against the layout. This module
checks the values: the weight that the upload claims, and that the numbers to be summed are finite and not too large.

Dense fields are added unchanged or rearranged, so the norms computed by the envelope apply. For a quantized upload,
every term is decoded and checked separately, and so is a term that a method derives from several fields.

| upload | error |
|---|---|
| num_examples of 0, -1, NaN, 1e12, 3.5, "7" | "num_examples: expected a whole number from 1 to ..." |
| a NaN or Inf anywhere in a dense field | "<field>: expected finite values, found ..." |
| codes whose decoded values are too large | "<name>: expected a norm of at most ..., found ..." |
| scores on held-out rows without a count, or for fewer than 64 rows | "rows_held_out: expected ..." |
| impossible counts of truncated rows | "read_rows: expected ..." |
| a finite field whose squares overflow | accepted below `max_norm`; refused above it |
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedveil.contract import held_out_report, row_counts
from fedveil.contract.codec import Buffer, QuantizedTensor
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.errors import UploadRefused, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.reply_content import require_records
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.wire import chunking, envelope, mmap_tensors


def check_upload(message: envelope.DecodedMessage, limits: UploadLimits) -> int:
    """Return an acceptable upload's num_examples. Raises UploadRefused, naming the field."""
    n = message.num_examples
    if type(n) is not int or not 1 <= n <= limits.max_examples:
        raise UploadRefused(f"num_examples: expected a whole number from 1 to {limits.max_examples}, found {n!r}")
    for faults in (held_out_report.find_fault, row_counts.find_fault):
        if reason := faults(message.report, limits.max_examples):
            raise UploadRefused(reason)
    for name, norm in message.norms.items():
        if not math.isfinite(norm):
            _check_finite(name, cast(Tensor, message.payload.fields[name]))
        _check_norm(name, norm, limits)
    return n


def judge_upload(
    exchange: MessageExchange, message: envelope.DecodedMessage, ctx: RoundContext, limits: UploadLimits
) -> tuple[AcceptedUpload, float]:
    """Return an acceptable upload in the server's own context, and the norm of everything it adds to the sums.

    Raises:
        UploadRefused: like `check_upload`.
    """
    upload = AcceptedUpload(message.payload, check_upload(message, limits), ctx, message.report)
    fields, norms = message.payload.fields, dict(message.norms)
    made = exchange.method.aggregate_shapes(exchange.spec, ctx.round).keys() - fields.keys()
    if made or any(isinstance(value, QuantizedTensor) for value in fields.values()):
        for term in exchange.contributions(upload).tensors:
            if term.value is not fields.get(term.name):
                norms[term.name] = float(torch.linalg.vector_norm(term.value, dtype=torch.float64))
                _check_norm(term.name, norms[term.name], limits)
    return upload, math.hypot(*norms.values())


def _check_norm(name: str, norm: float, limits: UploadLimits) -> None:
    if not norm <= limits.max_norm:
        raise UploadRefused(f"{name}: expected a norm of at most {limits.max_norm:g}, found {norm:g}")


def _check_finite(name: str, values: Tensor) -> None:
    bad = (~torch.isfinite(values)).flatten().nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        problem = f"{values.flatten()[first].item()} at entry {first} ({len(bad)} in total)"
        raise UploadRefused(f"{name}: expected finite values, found {problem}")


def sent_bytes(reply: Message) -> int:
    """Return the total size of a reply's arrays in bytes, regardless of their content."""
    return sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())


def message_bytes(reply: Message, most: int, folder: Path | None) -> Buffer:
    """Return the message in a reply, at most `most` bytes long; a long one is stored in a file in the run folder.

    Removes the reply's slices while reading.

    """
    require_records(reply.content)
    record = reply.content.array_records.get("fedveil", ArrayRecord())
    for array in record.values():
        if array.stype != chunking.STYPE:
            raise WireError(f"reply: an array has type {array.stype[:40]!r} instead of {chunking.STYPE}")
    total = sum(len(array.data) for array in record.values())
    if total > most:
        raise WireError(f"reply: its {total} bytes exceed the {most} that the run's layout allows")
    if len(record) != (count := -(-total // chunking.SLICE_BYTES)):
        raise WireError(f"reply: its {total} bytes need {count} slices, but it has {len(record)}")
    parts = (record.pop(name).data for name in chunking.order_slices(list(record)))
    return chunking.fill_slices(mmap_tensors.allocate(folder, total) if folder else bytearray(total), parts)
