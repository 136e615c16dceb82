"""Block-wise quantization of weights into codes with one scale per block, and dequantization.

    c_b   = max |x| over block b of the flat tensor                             the scale, fp32
    code  = index of the level closest to x / c_b                               tables "nf_sym" and "nf"
    code  = round(x / c_b * (2^(w-1) - 1)) + 2^(w-1) - 1                        table "absmax" (FedQSN, Eq. 4)
    x~    = level[code] * c_b

| table | number of levels | w | levels |
|---|---|---|---|
| "nf_sym" | 2^w + 1 | 1 to 4 | 0, and the 2^(w-1) normal quantiles from `_quantiles` with both signs, divided by the
  largest |
| "nf" | 2^w; 3 for w = 1 | 1 to 4 | as "nf_sym", with 2^(w-1) - 1 negative levels (-1, 0, 1 for w = 1); w = 4 is NF4 |
| "absmax" | 2^w - 1 | 2 to 8 | even steps from -1 to 1 |

On CUDA, a kernel quantizes a tensor (`triton_kernels`); if it does not work, or on other devices, torch does. Both
give the same codes and scales, bit for bit.

| case | result |
|---|---|
| a block of zeros | scale 0 and the codes for level 0; it decodes to zeros |
| a short last block | has its own scale; nothing is padded on the wire |
| an entry of 0 | decodes to 0 in every block |
| the largest entry of a block | decodes to itself, bit for bit |
| halfway between two levels | the lower level; "absmax" rounds to the even step |
| NaN, infinity | TaskError |
| empty tensor | no codes, no scales |
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedveil.contract.codec import QuantizedTensor
from fedveil.errors import ConfigError, TaskError
from fedveil.ops import triton_available
from fedveil.wire.quantized import QuantizedCodec

Table = Literal["nf_sym", "nf", "absmax"]

_OFFSET = 0.9677083  # the outermost quantile of the normal-float tables
_BITS = {"nf_sym": (1, 4), "nf": (1, 4), "absmax": (2, 8)}
_CHUNK = 1 << 17  # entries: half a megabyte, which stays in the cache and is worth the overhead of a torch call
_ALONE = threading.Lock()  # torch's number of threads is a setting of the whole process
_CHUNK_THERE = 1 << 26  # entries on a GPU, where a call costs more than the memory


@dataclass(frozen=True)
class BlockQuantizer:
    """A code table with `bits` bits per weight, for blocks of `block` entries."""

    table: Table = "nf_sym"
    bits: int = 2
    block: int = 256

    def __post_init__(self) -> None:
        low, high = _BITS[self.table]
        if not low <= self.bits <= high:
            why = "; with 1 bit, Eq. 4 makes every weight 0" if (self.table, self.bits) == ("absmax", 1) else ""
            raise ConfigError(f'bits: expected {low} to {high} with "{self.table}", found {self.bits}{why}')
        if self.block < 1:
            raise ConfigError(f"block: expected a block size of at least 1 entry, found {self.block}")

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the levels, ascending from -1 to 1 and including 0."""
        return _levels(self.table, self.bits)

    @property
    def codec(self) -> QuantizedCodec:
        """Return the codec that sends these codes."""
        return QuantizedCodec(len(self.levels), self.block)

    def quantise(self, x: Float[Tensor, "*s"]) -> QuantizedTensor:
        """Return codes (uint8, the shape of x) and scales (fp32, one per block), on x's device. Raises TaskError."""
        coded = self.coded(x)
        check_bits([coded])
        return coded

    def coded(self, x: Float[Tensor, "*s"]) -> QuantizedTensor:
        """Quantize without checking that values are finite, to avoid waiting for the GPU after every tensor."""
        flat = x.detach().reshape(-1)
        if kernels := triton_available.load_kernels(flat.device):
            codes, scales = kernels.quantize_blocks(flat, self.block, 2 ** (self.bits - 1) - 1, self._middles)
        else:
            codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
            scales = torch.empty(-(-len(flat) // self.block), device=flat.device)
            _each(flat, self.block, lambda part, rows: _quantise(flat[part], self, codes[part], scales[rows]))
        return QuantizedTensor(codes.reshape(x.shape), scales)

    @property
    def _middles(self) -> tuple[float, ...]:
        """Return the midpoints between neighboring levels; () if the levels are evenly spaced."""
        return (
            () if self.table == "absmax" else tuple((low + high) / 2 for low, high in itertools.pairwise(self.levels))
        )

    def dequantise(self, coded: QuantizedTensor) -> Float[Tensor, "..."]:
        """Return level[code] * scale, fp32, on the codes' device."""
        codes, scales = coded.codes.reshape(-1), coded.scales
        out = torch.empty(codes.shape, device=codes.device)
        table = torch.tensor(self.levels, device=codes.device)

        def restore(part: slice, rows: slice) -> None:
            torch.index_select(table, 0, codes[part].to(torch.int32), out=out[part])
            _by_block(out[part], scales[rows], self.block, torch.mul)

        _each(codes, self.block, restore)
        return out.reshape(coded.codes.shape)


def check_bits(coded: Sequence[QuantizedTensor]) -> None:
    """Raise TaskError if any value was not finite; waits for the device once."""
    largest = [c.scales.amax() for c in coded if len(c.scales)]  # NaN if a value is NaN
    if largest and not torch.isfinite(torch.stack(largest)).all():
        raise TaskError("weights: cannot quantize NaN or infinity; lower the learning rate")


@cache
def _levels(table: Table, bits: int) -> tuple[float, ...]:
    half = 2 ** (bits - 1)
    if table == "absmax":
        return tuple(i / (half - 1) for i in range(1 - half, half))
    negative = half if table == "nf_sym" else max(1, half - 1)
    return (*(-q for q in _quantiles(negative)), 0.0, *reversed(_quantiles(half)))


def _quantiles(count: int) -> list[float]:
    """Return normal quantiles at `count` even steps from _OFFSET to 1/2 (exclusive), scaled to start at 1."""
    quantiles = [NormalDist().inv_cdf(_OFFSET + (0.5 - _OFFSET) * i / count) for i in range(count)]
    return [q / quantiles[0] for q in quantiles]


def _each(flat: Tensor, block: int, work: Callable[[slice, slice], None]) -> None:
    """Call `work` on every chunk; on the CPU, in as many threads as torch has, each with one torch thread.

    torch would synchronize its threads after every operation, a dozen times per chunk. If another process uses one of
    the cores, each wait lasts until the scheduler gets back to the thread: 0.01 GB/s.
    """
    if flat.device.type != "cpu":
        for chunk in _chunks(len(flat), block, _CHUNK_THERE):
            work(*chunk)
        return
    chunks = _chunks(len(flat), block, _CHUNK)
    with _ALONE:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # also applies to threads that start later
        try:
            if min(threads, len(chunks)) < 2:
                for chunk in chunks:
                    work(*chunk)
                return
            with ThreadPoolExecutor(threads, "codes") as pool:
                list(pool.map(lambda chunk: work(*chunk), chunks))
        finally:
            torch.set_num_threads(threads)


def _chunks(count: int, block: int, size: int) -> list[tuple[slice, slice]]:
    """Return slices of the entries and of their blocks' scales, as chunks of whole blocks."""
    rows = max(1, size // block)
    return [
        (slice(i * block, min((i + rows) * block, count)), slice(i, min(i + rows, -(-count // block))))
        for i in range(0, -(-count // block), rows)
    ]


def _quantise(x: Tensor, how: BlockQuantizer, codes: Tensor, scales: Tensor) -> None:
    """Fill `codes` and `scales` for whole blocks; the last block may be short."""
    x, whole = x.to(torch.float32, copy=True), len(x) - len(x) % how.block
    torch.amax(x[:whole].view(-1, how.block).abs(), 1, out=scales[: whole // how.block])
    if whole < len(x):
        scales[-1] = x[whole:].abs().amax()
    _by_block(x, torch.where(scales == 0, 1.0, scales), how.block, torch.div)
    if how.table == "absmax":
        half = 2 ** (how.bits - 1) - 1
        codes.copy_(x.mul_(half).round_().add_(half))
        return
    codes.zero_()
    for middle in how._middles:
        codes.add_(x > middle)


def _by_block(x: Tensor, scales: Tensor, block: int, operation: Callable[..., Tensor]) -> None:
    """Apply x <- operation(x, the scale of its block), in place."""
    whole = len(x) - len(x) % block
    rows = x[:whole].view(-1, block)
    operation(rows, scales[: len(rows), None], out=rows)
    if whole < len(x):
        operation(x[whole:], scales[-1], out=x[whole:])
