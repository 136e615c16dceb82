"""Quantized codec: block-wise quantized entries, packed to within 2 % of log2(levels) bits.

Bytes: the scales, then the packed codes.

- Scales: ceil(entries / block) little-endian fp32 values, finite and not negative; scale j belongs to the
  `block` entries of the flat tensor that start at entry block * j. The last block may be shorter.
- Codes: digits in base L = `levels`, row-major, k per word; the word for digits c_0 ... c_{k-1} is the
  number c_0 + c_1 L + ... + c_{k-1} L^(k-1), in b = ceil(k log2 L) bits. Word i occupies bits b i to b i + b -
  1 of a single bit string, where bit n is bit n % 8 (bit 0 is the least significant) of byte n // 8. The
  last word may have fewer digits, r; it has ceil(r log2 L) bits. Up to 7 padding bits after it are 0.

k is at most 11 and b is between 8 and 56. Among these pairs, `code_word` chooses the one with the fewest bits
per digit; ties go to a pair with b in whole bytes, and then to the smallest. If L is a power of two, this
is plain packing with log2(L) bits per code. Bits per entry: b / k + 32 / block, plus less than one byte per
tensor:

| L | 2 | 3 | 4 | 5 | 9 | 15 | 16 | 17 | 33 | 256 |
|---|---|---|---|---|---|---|---|---|---|---|
| k digits | 8 | 5 | 4 | 6 | 11 | 11 | 2 | 11 | 11 | 1 |
| in b bits | 8 | 8 | 8 | 14 | 35 | 43 | 8 | 45 | 56 | 8 |
| b / k | 1 | 1.6 | 2 | 2.333 | 3.182 | 3.909 | 4 | 4.091 | 5.091 | 8 |
| over log2 L | 0 | 0.9 % | 0 | 0.5 % | 0.4 % | 0.1 % | 0 | 0.1 % | 0.9 % | 0 |

| case | what happens |
|---|---|
| empty tensor | 0 bytes, no scale |
| 0-d tensor | one scale, one code |
| non-contiguous input | copied once, in row-major order of the view |
| CUDA tensor | packed on its device, then copied to the CPU once |
| decoded tensors | on the CPU; `decode_on` unpacks the same codes on another device |
| scale 0 or -0.0 | preserved, bit for bit |
| scale negative, infinite or NaN; a code of L or more; a pad bit that is 1 | WireError, on both ends |
| decoded tensors | codes are new; scales are a view of the received bytes: do not write to them |

Codes are packed in chunks of about 128 K, so that only a few MB are in use besides input and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.contract.codec import Buffer, QuantizedTensor, Value, count_elements, raw_bytes, view_bytes
from fedveil.errors import ConfigError, WireError

_CHUNK_CODES = 1 << 17
_CODES_THERE = 1 << 24  # codes per pass on a GPU: the computation needs about 20 bytes per code
_MAX_DIGITS = 11  # the smallest limit for which every L is within 2 %
_MIN_BITS = 8  # 8 words then fill at least 8 bytes, see `_window`
_MAX_BITS = 56  # a word that starts inside a byte still ends within 64 bits of that byte's start


@cache
def code_word(levels: int) -> tuple[int, int]:
    """Return (k, b): a word of b bits holds k digits in base `levels`."""
    words = [(k, _bits(levels, k)) for k in range(1, _MAX_DIGITS + 1)]
    return min((w for w in words if _MIN_BITS <= w[1] <= _MAX_BITS), key=lambda w: (w[1] / w[0], w[1] % 8 != 0, w[1]))


@dataclass(frozen=True)
class QuantizedCodec:
    """Encodes codes below `levels`, with one scale per block of `block` codes."""

    levels: int
    block: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= 256:
            raise ConfigError(f"levels: expected 2 to 256, found {self.levels}")
        if self.block < 1:
            raise ConfigError(f"block: expected at least 1, found {self.block}")

    @property
    def name(self) -> str:
        """Return the codec's name, such as "codes 5 block 256"."""
        return f"codes {self.levels} block {self.block}"

    def encode(self, value: Value) -> list[Buffer]:
        """Return a view of the scales, and the packed codes."""
        coded = _checked(value)
        if coded.scales.dtype != torch.float32:
            raise WireError(f"scales: expected float32, found {str(coded.scales.dtype).removeprefix('torch.')}")
        if tuple(coded.scales.shape) != (expected := (self._blocks(coded.codes.numel()),)):
            raise WireError(f"scales: expected shape {expected}, found {tuple(coded.scales.shape)}")
        _check_scales(coded.scales)
        scales = raw_bytes(coded.scales)
        if coded.codes.device.type != "cpu" and coded.codes.numel():
            return [scales, raw_bytes(_pack_there(coded.codes.reshape(-1), self.levels))]
        return [scales, _pack(np.frombuffer(raw_bytes(coded.codes), dtype=np.uint8), self.levels).data]

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> QuantizedTensor:
        """Return new codes, with the scales as a view of `data`."""
        scales, packed = self._parts(data, shape)
        codes = _unpack(np.frombuffer(packed, dtype=np.uint8), count_elements(shape), self.levels)
        return QuantizedTensor(torch.from_numpy(codes).reshape(shape), scales)

    def decode_on(self, data: memoryview, shape: tuple[int, ...], device: torch.device) -> QuantizedTensor:
        """Copy the packed codes to another device and decode there. Raises WireError."""
        scales, packed = self._parts(data, shape)
        there = view_bytes(packed, torch.uint8, (len(packed),)).to(device)
        return QuantizedTensor(_unpack_there(there, count_elements(shape), self.levels).view(shape), scales.to(device))

    def _parts(self, data: memoryview, shape: tuple[int, ...]) -> tuple[Tensor, memoryview]:
        if len(data) != (expected := self.nbytes(shape)):
            raise WireError(f"expected {expected} bytes for {self.name} of shape {shape}, found {len(data)}")
        blocks = self._blocks(count_elements(shape))
        scales = view_bytes(data[: 4 * blocks], torch.float32, (blocks,))
        _check_scales(scales)
        return scales, data[4 * blocks :]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of the scales (4 each) and the packed codes."""
        return 4 * self._blocks(count_elements(shape)) + _packed_bytes(count_elements(shape), self.levels)

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of the codes."""
        return tuple(_checked(value).codes.shape)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)


def _checked(value: Value) -> QuantizedTensor:
    if not isinstance(value, QuantizedTensor):
        raise WireError(f"expected codes with their scales, found {type(value).__name__}")
    if value.codes.dtype != torch.uint8:
        raise WireError(f"codes: expected uint8, found {str(value.codes.dtype).removeprefix('torch.')}")
    return value


def _check_scales(scales: Tensor) -> None:
    refused = ~(torch.isfinite(scales) & (scales >= 0))
    if refused.any():
        first = int(refused.nonzero()[0])
        raise WireError(f"scales: expected finite values of at least 0, found {float(scales[first])} at {first}")


def _bits(levels: int, digits: int) -> int:
    return int((levels**digits - 1).bit_length())  # ceil(digits * log2(levels)), exact


def _packed_bytes(count: int, levels: int) -> int:
    k, b = code_word(levels)
    return -(-(count // k * b + _bits(levels, count % k)) // 8)


def _rows(levels: int) -> tuple[int, int, int]:
    """Return (codes per row, bytes per row, rows per chunk). A row is 8 words, so it has whole bytes."""
    k, b = code_word(levels)
    return 8 * k, b, _CHUNK_CODES // (8 * k)


def _pack(codes: NDArray[np.uint8], levels: int) -> NDArray[np.uint8]:
    width, row_bytes, rows = _rows(levels)
    packed = np.empty(_packed_bytes(len(codes), levels), dtype=np.uint8)
    for chunk in range(-(-len(codes) // (rows * width))):
        part = codes[chunk * rows * width : (chunk + 1) * rows * width]
        if (max_code := int(part.max())) >= levels:
            raise WireError(f"codes: expected values below {levels}, found {max_code}")
        if short := -len(part) % width:
            part = np.concatenate([part, np.zeros(short, dtype=np.uint8)])
        out = packed[chunk * rows * row_bytes : (chunk + 1) * rows * row_bytes]
        out[:] = _pack_words(_to_words(part, levels), row_bytes)[: len(out)]
    return packed


def _unpack(packed: NDArray[np.uint8], count: int, levels: int) -> NDArray[np.uint8]:
    width, row_bytes, rows = _rows(levels)
    codes = np.empty(count, dtype=np.uint8)
    for chunk in range(-(-count // (rows * width))):
        out = codes[chunk * rows * width : (chunk + 1) * rows * width]
        part = packed[chunk * rows * row_bytes : (chunk + 1) * rows * row_bytes]
        digits = _to_digits(_unpack_words(part, -(-len(out) // width), row_bytes), levels)
        if digits[len(out) :].any():
            raise WireError(f"codes: the bits after the last of {count} codes below {levels} must be zero")
        out[:] = digits[: len(out)]
    return codes


def _to_words(codes: NDArray[np.uint8], levels: int) -> NDArray[np.uint64]:
    """Return words of k digits, by Horner's rule, computed in the narrowest integers that hold a word."""
    k, b = code_word(levels)
    digits = codes.reshape(-1, k)
    words = digits[:, k - 1].astype(f"u{_width(b)}")
    for j in reversed(range(k - 1)):
        words *= words.dtype.type(levels)
        words += digits[:, j]
    return words.astype(np.uint64)


def _to_digits(words: NDArray[np.uint64], levels: int) -> NDArray[np.uint8]:
    k, b = code_word(levels)
    if (max_word := int(words.max())) >= levels**k:
        raise WireError(f"codes: expected {k} codes below {levels} in a word of {b} bits, found the word {max_word:#x}")
    digits = np.empty((len(words), k), dtype=np.uint8)
    rest = words.astype(f"u{_width(b)}")
    for j in range(k - 1):
        quotient = rest // rest.dtype.type(levels)
        np.subtract(rest, quotient * rest.dtype.type(levels), out=digits[:, j], casting="unsafe")
        rest = quotient
    digits[:, k - 1] = rest
    return digits.reshape(-1)


def _width(bits: int) -> int:
    return next(size for size in (1, 2, 4, 8) if bits <= 8 * size)


def _pack_words(words: NDArray[np.uint64], b: int) -> NDArray[np.uint8]:
    """Pack each 8 words of b bits into a row of b bytes."""
    rows = len(words) // 8
    packed = np.zeros(rows * b + 8, dtype=np.uint8)
    for i in range(8):
        window = _window(packed, rows, b, i)
        window |= words[i::8] << np.uint64(b * i % 8)
    return packed[: rows * b]


def _unpack_words(packed: NDArray[np.uint8], rows: int, b: int) -> NDArray[np.uint64]:
    """Return the words of `rows` rows; missing bytes at the end count as zero."""
    padded = np.zeros(rows * b + 8, dtype=np.uint8)
    padded[: len(packed)] = packed
    words = np.empty(rows * 8, dtype=np.uint64)
    for i in range(8):
        words[i::8] = (_window(padded, rows, b, i) >> np.uint64(b * i % 8)) & np.uint64((1 << b) - 1)
    return words


def _window(packed: NDArray[np.uint8], rows: int, b: int, i: int) -> NDArray[np.uint64]:
    """View 8 bytes of each row (of b bytes), from the byte where word i starts. Since b >= 8, none overlap."""
    return np.ndarray((rows,), "<u8", packed, b * i // 8, (b,))


def _pack_there(codes: Tensor, levels: int) -> Tensor:
    """Pack flat codes like `_pack`, but with torch operations on their device."""
    (k, b), width = code_word(levels), _rows(levels)[0]
    powers = torch.tensor([levels**j for j in range(k)], device=codes.device)
    bit = 8 * torch.arange(b, device=codes.device)  # the bit of a row at which each byte begins
    word, shift = bit // b, bit % b
    packed = []
    for part in torch.split(codes, _CODES_THERE // width * width):
        if (max_code := int(part.max())) >= levels:
            raise WireError(f"codes: expected values below {levels}, found {max_code}")
        digits = torch.zeros(-(-len(part) // width) * width, dtype=torch.int64, device=codes.device)
        digits[: len(part)] = part
        words = (digits.view(-1, k) * powers).sum(1).view(-1, 8)
        after = words.roll(-1, 1)  # the first word, now after the last, is shifted out of its byte
        packed.append((words[:, word] >> shift | after[:, word] << (b - shift)).to(torch.uint8).view(-1))
    return torch.cat(packed)[: _packed_bytes(len(codes), levels)]


def _unpack_there(packed: Tensor, count: int, levels: int) -> Tensor:
    """Unpack like `_unpack`, but with torch operations on the device of the packed codes."""
    (k, b), (width, row_bytes, _) = code_word(levels), _rows(levels)
    if not count:
        return packed
    bit = b * torch.arange(8, device=packed.device)  # the bit of a row at which each word begins
    codes = torch.empty(-(-count // width) * width, dtype=torch.uint8, device=packed.device)
    rows = _CODES_THERE // width
    for part, out in zip(torch.split(packed, rows * row_bytes), torch.split(codes, rows * width), strict=True):
        padded = torch.zeros(len(out) // width * row_bytes, dtype=torch.uint8, device=packed.device)
        padded[: len(part)] = part
        row, words = (
            padded.view(-1, row_bytes),
            torch.zeros(len(out) // width, 8, dtype=torch.int64, device=packed.device),
        )
        for byte in range((b + 14) // 8):  # bits beyond the row belong to no word
            words |= row[:, (bit // 8 + byte).clamp_(max=row_bytes - 1)].long() << 8 * byte
        words = (words >> bit % 8 & ((1 << b) - 1)).view(-1)
        if (max_word := int(words.max())) >= levels**k:
            raise WireError(
                f"codes: expected {k} codes below {levels} in a word of {b} bits, found the word {max_word:#x}"
            )
        digits = out.view(-1, k)
        for j in range(k):
            digits[:, j] = words % levels
            words //= levels
    if codes[count:].any():
        raise WireError(f"codes: the bits after the last of {count} codes below {levels} must be zero")
    return codes[:count]
