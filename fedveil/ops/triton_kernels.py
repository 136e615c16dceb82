"""Triton kernels for GPUs: masks, packing with masks, codes. Each gives the same bits as torch.

Import this module through `triton_available.load_kernels`: Triton may be missing, or may not work. With
TRITON_INTERPRET=1, the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_Result = TypeVar("_Result")

_LANES = 128  # keystream blocks per program, one per thread
_DRAWN = 64 * _LANES  # mask entries per program
_PACKED = 2048  # entries per program that packs or unpacks
_CODED = 4096  # entries per program that quantizes, or one block


def _there(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wrap a function: make tensors contiguous and select their device, because Triton launches on the current one."""

    @functools.wraps(function)
    def run(*given: Any) -> _Result:
        with torch.cuda.device_of(given[0]):  # type: ignore[no-untyped-call]
            return function(*(g.contiguous() if isinstance(g, Tensor) else g for g in given))

    return run


def self_test(device: torch.device) -> None:
    """Run every kernel once. Raises the error from a kernel that does not work."""
    drawn = draw_mask(torch.zeros(2, 16, dtype=torch.int32, device=device), 128, 1, 100)
    values = torch.ones(100, dtype=torch.int16, device=device)
    unpack_masked(pack_masked(values, drawn), drawn, count_masked(drawn)[0])
    for middles in ((), (0.0,)):
        quantize_blocks(torch.ones(100, device=device), 10, 1, middles)


@_there
def draw_mask(states: Tensor, first: int, rest: int, count: int) -> Tensor:
    """Compute `chacha20.decide_bits` for `first` below 256 and at least one entry: (count,), bool."""
    programs = -(-count // _DRAWN)
    out = torch.empty(programs * _DRAWN // 4, dtype=torch.int32, device=states.device)
    tied = torch.empty(programs, dtype=torch.int32, device=states.device)
    splat = int.from_bytes(bytes([first] * 4), "little", signed=True)
    _draw[(programs,)](states[0], out, tied, splat, rest > 0, _LANES)
    if rest:
        ends = tied.cumsum(0)
        blocks = -(-int(ends[-1]) // (16 * _LANES)) * _LANES
        words = torch.empty(max(1, blocks) * 16, dtype=torch.int32, device=out.device)
        if blocks:
            _words[(blocks // _LANES,)](states[1], words, _LANES)
        _settle[(programs,)](out, words, ends, rest, _DRAWN // 4)
    return out.view(torch.bool)[:count]


@triton.jit
def _turned(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(state, i: tl.constexpr, LANES: tl.constexpr):
    return tl.zeros([LANES], tl.uint32) + tl.load(state + i).to(tl.uint32, bitcast=True)


@triton.jit
def _blocks(state, LANES: tl.constexpr):
    """Return this program's keystream words: (LANES, 16), one block per row."""
    number = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.uint32)
    s0, s1, s2, s3 = _word(state, 0, LANES), _word(state, 1, LANES), _word(state, 2, LANES), _word(state, 3, LANES)
    s4, s5, s6, s7 = _word(state, 4, LANES), _word(state, 5, LANES), _word(state, 6, LANES), _word(state, 7, LANES)
    s8, s9, sa, sb = _word(state, 8, LANES), _word(state, 9, LANES), _word(state, 10, LANES), _word(state, 11, LANES)
    sc = _word(state, 12, LANES) + number
    sd, se, sf = _word(state, 13, LANES), _word(state, 14, LANES), _word(state, 15, LANES)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, xa, xb, xc, xd, xe, xf = s8, s9, sa, sb, sc, sd, se, sf
    for _ in range(10):
        x0, x4, x8, xc = _quarter(x0, x4, x8, xc)
        x1, x5, x9, xd = _quarter(x1, x5, x9, xd)
        x2, x6, xa, xe = _quarter(x2, x6, xa, xe)
        x3, x7, xb, xf = _quarter(x3, x7, xb, xf)
        x0, x5, xa, xf = _quarter(x0, x5, xa, xf)
        x1, x6, xb, xc = _quarter(x1, x6, xb, xc)
        x2, x7, x8, xd = _quarter(x2, x7, x8, xd)
        x3, x4, x9, xe = _quarter(x3, x4, x9, xe)
    # `join` adds a last axis, so the words that are joined first differ in the highest bit of their number.
    low = tl.join(
        tl.join(tl.join(x0 + s0, x8 + s8), tl.join(x4 + s4, xc + sc)),
        tl.join(tl.join(x2 + s2, xa + sa), tl.join(x6 + s6, xe + se)),
    )
    high = tl.join(
        tl.join(tl.join(x1 + s1, x9 + s9), tl.join(x5 + s5, xd + sd)),
        tl.join(tl.join(x3 + s3, xb + sb), tl.join(x7 + s7, xf + sf)),
    )
    return tl.reshape(tl.join(low, high), [LANES, 16])


@triton.jit
def _places(LANES: tl.constexpr):
    """Return the positions of the words from `_blocks`."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    return block[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def _words(state, out, LANES: tl.constexpr):
    tl.store(out + _places(LANES), _blocks(state, LANES).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["splat"])
def _draw(state, out, tied, splat, TIES: tl.constexpr, LANES: tl.constexpr):
    """Draw four entries per word: 1 if the byte is below the threshold, 2 for a tie; count the ties."""
    x, t = _blocks(state, LANES), splat.to(tl.uint32, bitcast=True)
    below = (x | 0x80808080) - (t & 0x7F7F7F7F)  # the high bit: the lower seven bits of x are not below those of t
    # x ^ 0xFFFFFFFF replaces ~x, which Triton's interpreter cannot compute in uint32.
    other = x ^ t
    codes = ((((x ^ 0xFFFFFFFF) & t) | ((other | below) ^ 0xFFFFFFFF)) >> 7) & 0x01010101
    if TIES:
        other = ((other & 0x7F7F7F7F) + 0x7F7F7F7F) | other  # the high bit: the bytes differ
        equal = ((other ^ 0xFFFFFFFF) >> 7) & 0x01010101
        tl.store(tied + tl.program_id(0), tl.sum(tl.sum(((equal * 0x01010101) >> 24).to(tl.int32), 1), 0))
        codes = codes + equal * 2
    tl.store(out + _places(LANES), codes.to(tl.int32, bitcast=True))


@triton.jit
def _before(ends):
    """Return the count over all programs before this one; `ends` contains the running total after each program."""
    number = tl.program_id(0)
    return tl.load(ends + number - 1, mask=number > 0, other=0)


@triton.jit(do_not_specialize=["rest"])
def _settle(drawn, words, ends, rest, SIZE: tl.constexpr):
    """Decide the ties, four entries per word: each tie uses the next word, in order."""
    at = drawn + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    codes = tl.load(at)
    ties = (codes >> 1) & 0x01010101
    upto = ties * 0x01010101  # each byte: the word's ties up to and including it
    many = upto >> 24
    words += _before(ends)  # so that this program's ranks fit in int32
    rank = tl.cumsum(many, 0) - many - 1
    for i in tl.static_range(4):
        tied = ((ties >> (8 * i)) & 1) != 0
        word = tl.load(words + rank + ((upto >> (8 * i)) & 255), mask=tied, other=0).to(tl.uint32, bitcast=True) >> 8
        codes -= tl.where(tied, 2 - (word.to(tl.int32) < rest).to(tl.int32), 0) << (8 * i)
    tl.store(at, codes, mask=many > 0)


@_there
def pack_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return the entries of the flat integer tensor `values` where the mask is 1, in order."""
    ends, ones = count_masked(mask)
    out = torch.empty(ones, dtype=values.dtype, device=values.device)
    if ones:
        _gather[(len(ends),)](values, mask.view(torch.uint8), ends, out, len(mask), _PACKED)
    return out


@_there
def unpack_masked(values: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
    """Return a flat tensor with `values` in order where the flat mask is 1, and zeros elsewhere."""
    out = torch.empty(len(mask), dtype=values.dtype, device=values.device)
    if len(mask):
        _scatter[(len(ends),)](values, mask.view(torch.uint8), ends, out, len(mask), _PACKED)
    return out


@_there
def count_masked(mask: Tensor) -> tuple[Tensor, int]:
    """Return the running count of a flat mask's ones after each program's entries, and the total."""
    counts = torch.empty(-(-len(mask) // _PACKED), dtype=torch.int32, device=mask.device)
    if not len(mask):
        return counts, 0
    _count[(len(counts),)](mask.view(torch.uint8), counts, len(mask), _PACKED)
    ends = counts.cumsum(0)
    return ends, int(ends[-1])


@triton.jit
def _loaded(pointer, start, n, SIZE: tl.constexpr):
    """Load entries from `start` on, with zeros after the last; without a mask (usually), several per thread at once."""
    at = tl.arange(0, SIZE)
    if start + SIZE <= n:
        entries = tl.load(pointer + start + at)
    else:
        entries = tl.load(pointer + start + at, mask=at < (n - start).to(tl.int32), other=0)
    return entries


@triton.jit
def _count(mask, counts, n, SIZE: tl.constexpr):
    mask_bits = _loaded(mask, tl.program_id(0).to(tl.int64) * SIZE, n, SIZE).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(mask_bits, 0))


@triton.jit
def _gather(values, mask, ends, out, n, SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    mask_bits = _loaded(mask, start, n, SIZE).to(tl.int32)
    rank = tl.cumsum(mask_bits, 0) - 1
    tl.store(out + _before(ends) + rank, _loaded(values, start, n, SIZE), mask=mask_bits != 0)


@triton.jit
def _scatter(values, mask, ends, out, n, SIZE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    mask_bits = _loaded(mask, start, n, SIZE).to(tl.int32)
    rank = tl.cumsum(mask_bits, 0) - 1
    value = tl.load(values + _before(ends) + rank, mask=mask_bits != 0, other=0)
    at = tl.arange(0, SIZE)
    if start + SIZE <= n:
        tl.store(out + start + at, value)
    else:
        tl.store(out + start + at, value, mask=at < (n - start).to(tl.int32))


@_there
def quantize_blocks(flat: Tensor, block: int, half: int, middles: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return a flat tensor's codes (uint8) and scales (fp32, one per block); a NaN makes its block's scale NaN.

    Without `middles`, the code is the nearest even step from -half to half; with them, the number of middles below.
    """
    wide = triton.next_power_of_2(block)
    rows, blocks = max(1, _CODED // wide), -(-len(flat) // block)
    codes = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
    scales = torch.empty(blocks, device=flat.device)
    if blocks:
        edges = _edges(middles, flat.device)
        # A fused product and sum would be rounded only once; the CPU rounds both.
        _code[(-(-blocks // rows),)](
            flat, codes, scales, edges, len(flat), block, half, len(middles), wide, rows, enable_fp_fusion=False
        )
    return codes, scales


@functools.cache
def _edges(middles: tuple[float, ...], device: torch.device) -> Tensor:
    """Copy the middles to the device once: a copy waits for the GPU, and a model has hundreds of tensors."""
    return torch.tensor(middles or (0.0,), dtype=torch.float32, device=device)


@triton.jit
def _code(
    x, codes, scales, edges, n, block: tl.constexpr, half: tl.constexpr, MIDDLES: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = first * block
    at = row[:, None] * block + column[None, :]
    left = tl.minimum(n - start, ROWS * block).to(tl.int32)  # this program's entries
    if block == WIDE and left == ROWS * block:  # without a mask, a thread loads several entries at once
        value = tl.load(x + start + at).to(tl.float32)
    else:
        value = tl.load(x + start + at, mask=(column < block)[None, :] & (at < left), other=0.0).to(tl.float32)
    is_nan = tl.max((value != value).to(tl.int32), 1) > 0  # a maximum ignores NaN
    scale = tl.where(is_nan, float("nan"), tl.max(tl.abs(value), 1))
    tl.store(scales + first + row, scale, mask=row * block < left)
    value = tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros([ROWS, WIDE], tl.float32))
    if MIDDLES == 0:
        even = value * half + 12582912.0  # 1.5 * 2**23: the sum has no fraction bits, and rounds to even
        code = (even - 12582912.0 + half).to(tl.int32).to(tl.uint8)
    else:
        below = tl.zeros([ROWS, WIDE], tl.int32)
        for i in tl.static_range(MIDDLES):
            below += (value > tl.load(edges + i)).to(tl.int32)
        code = below.to(tl.uint8)
    if block == WIDE and left == ROWS * block:
        tl.store(codes + start + at, code)
    else:
        tl.store(codes + start + at, code, mask=(column < block)[None, :] & (at < left))
