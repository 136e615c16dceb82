"""Every codec gives back every bit, in the bytes that its docstring states, and refuses any others."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.codec import QuantizedTensor
from fedveil.errors import ConfigError, WireError
from fedveil.wire.bits import BitCodec
from fedveil.wire.dense import DenseCodec
from fedveil.wire.quantized import QuantizedCodec, code_word
from fedveil.wire.seeded_masks import SeededMaskCodec
from tests.pretend import DEVICE, Pretended

KEY = bytes(range(7, 39))
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
FLOATS = list(INTEGER)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
layouts = st.sampled_from(["contiguous", "transposed", "strided"])
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=60, deadline=None)


def joined(codec, value) -> bytes:
    """As the envelope does it."""
    return b"".join(codec.encode(value))


def there_and_back(codec, value):
    data = joined(codec, value)
    assert len(data) == codec.nbytes(codec.shape(value))
    return codec.decode(memoryview(b"8 before" + data + b"after")[8 : 8 + len(data)], codec.shape(value))


def random_integers(shape, layout, seed, low, high, dtype=torch.int64) -> torch.Tensor:
    """A tensor of that shape and memory layout."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        drawn = torch.randint(low, high, shape[::-1], generator=generator, dtype=dtype)
        return drawn.permute(tuple(range(len(shape)))[::-1])
    if layout == "strided":
        return torch.randint(low, high, (*shape, 2), generator=generator, dtype=dtype)[..., 1]
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def random_coded(codec, shape, layout="contiguous", seed=0) -> QuantizedTensor:
    codes = random_integers(shape, layout, seed, 0, codec.levels, torch.uint8)
    scales = torch.rand(-(-codes.numel() // codec.block), 2, generator=torch.Generator().manual_seed(seed))[:, 0]
    return QuantizedTensor(codes, scales.contiguous() if layout == "contiguous" else scales)


# --- dense ---


@examples
@given(shapes, layouts, seeds, st.sampled_from(FLOATS))
def test_dense_gives_back_every_bit_nan_payloads_included(shape, layout, seed, dtype):
    integer = INTEGER[dtype]
    size = torch.iinfo(integer)
    patterns = random_integers(shape, layout, seed, size.min, size.max + 1, integer)
    value, before = patterns.view(dtype), patterns.clone()
    assert value.is_contiguous() == patterns.is_contiguous()
    back = there_and_back(DenseCodec(dtype), value)
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(back.view(integer), before)
    assert torch.equal(patterns, before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_keeps_signalling_nans_infinities_and_negative_zero(dtype):
    bits = {
        torch.float32: [0x7F800001, -0x400000 + 5, 0x7F800000, -(2**31), 1],
        torch.float16: [0x7C01, -0x200 + 5, 0x7C00, -(2**15), 1],
        torch.bfloat16: [0x7F81, -0x40 + 5, 0x7F80, -(2**15), 1],
    }[dtype]
    patterns = torch.tensor(bits, dtype=INTEGER[dtype])
    assert patterns.view(dtype).isnan().tolist() == [True, True, False, False, False]
    assert there_and_back(DenseCodec(dtype), patterns.view(dtype)).view(INTEGER[dtype]).tolist() == bits


def test_dense_bytes_by_hand():
    assert joined(DenseCodec(), torch.tensor([[1.0, -2.5]])) == bytes.fromhex("0000803f 000020c0")
    assert joined(DenseCodec(torch.float16), torch.tensor(1.0).half()) == bytes.fromhex("003c")
    assert joined(DenseCodec(torch.bfloat16), torch.tensor([1.0, -2.5]).bfloat16()) == bytes.fromhex("803f 20c0")
    assert [DenseCodec(d).name for d in FLOATS] == ["dense float32", "dense bfloat16", "dense float16"]


def test_dense_copies_nothing():
    value = torch.arange(6.0).reshape(2, 3)
    (part,) = DenseCodec().encode(value)
    assert np.frombuffer(part, np.uint8).ctypes.data == value.data_ptr()
    data = bytearray(part)
    back = DenseCodec().decode(memoryview(data), (2, 3))
    data[:4] = np.float32(9.0).tobytes()
    assert back[0, 0] == 9.0
    assert joined(DenseCodec(), torch.nn.Parameter(value)) == bytes(part)


@pytest.mark.long
def test_a_view_of_bytes_says_nothing_and_leaves_the_filters_of_warnings_alone():
    """In a process of its own, since torch says it once."""
    program = """
import warnings, torch
from fedveil.contract.codec import view_bytes
warnings.simplefilter("error")
before = list(warnings.filters)
assert view_bytes(memoryview(bytes(8)), torch.float32, (2,)).tolist() == [0, 0]
assert warnings.filters == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_entry_of_a_strided_view(dtype):
    """torch calls it contiguous, and refuses to view it as bytes."""
    value = torch.arange(4.0).to(dtype)[1::2][:1]
    assert (value.stride(), value.is_contiguous()) == ((2,), True)
    assert there_and_back(DenseCodec(dtype), value).tolist() == [1.0]


def test_dense_refuses():
    with pytest.raises(WireError, match="expected 24 bytes for dense float32 of shape .2, 3., found 23"):
        DenseCodec().decode(memoryview(bytes(23)), (2, 3))
    with pytest.raises(WireError, match="expected 12 bytes .* found 13"):
        DenseCodec(torch.float16).decode(memoryview(bytes(13)), (6,))
    with pytest.raises(WireError, match="expected 0 bytes .* found 4"):
        DenseCodec().decode(memoryview(bytes(4)), (0, 3))
    for refuse in (DenseCodec().encode, DenseCodec().shape):
        with pytest.raises(WireError, match="expected dtype float32, found float16"):
            refuse(torch.zeros(2, dtype=torch.float16))
        with pytest.raises(WireError, match="expected a float32 tensor, found bytes"):
            refuse(b"1234")
    with pytest.raises(ConfigError, match="expected one of float32, bfloat16, float16, found int8"):
        DenseCodec(torch.int8)


# --- bits ---


@examples
@given(shapes, layouts, seeds)
def test_bits_give_back_every_bit(shape, layout, seed):
    value = random_integers(shape, layout, seed, 0, 2, torch.uint8).view(torch.bool)
    before = value.clone()
    back = there_and_back(BitCodec(), value)
    assert (back.dtype, back.shape) == (torch.bool, value.shape)
    assert torch.equal(back, before)
    assert torch.equal(value, before)
    naive = sum(bit << i for i, bit in enumerate(before.flatten().tolist()))
    assert joined(BitCodec(), value) == naive.to_bytes(math.ceil(before.numel() / 8), "little")


def test_bits_by_hand():
    # entries 0, 3 and 9 of 11, little endian: 2^0 + 2^3 = 9, and 2^1 = 2
    value = torch.zeros(11, dtype=torch.bool)
    value[[0, 3, 9]] = True
    assert joined(BitCodec(), value) == bytes([9, 2])
    assert joined(BitCodec(), torch.tensor(True)) == b"\x01"
    assert [BitCodec().nbytes(s) for s in [(), (0,), (8,), (3, 3), (1000, 1000)]] == [1, 0, 1, 2, 125_000]
    assert BitCodec().name == "bits"


@pytest.mark.parametrize(
    "data,shape,match",
    [
        (b"\x01", (3, 3), "expected 2 bytes for 9 bits .* found 1"),
        (b"\x01\x00\x00", (3, 3), "expected 2 bytes for 9 bits .* found 3"),
        (b"\x00", (0,), "expected 0 bytes .* found 1"),
        (b"\xff\x02", (3, 3), "expected 7 zero bits of padding after 9 bits, found 0b1"),
        (b"\x80", (7,), "expected 1 zero bits of padding after 7 bits"),
    ],
)
def test_bits_refuse(data, shape, match):
    with pytest.raises(WireError, match=match):
        BitCodec().decode(memoryview(data), shape)


def test_bits_refuse_other_values():
    with pytest.raises(WireError, match="expected dtype bool, found uint8"):
        BitCodec().encode(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(WireError, match="expected a bool tensor, found bytes"):
        BitCodec().shape(KEY)


# --- codes ---


def naive_word(levels: int) -> tuple[int, int]:
    words = []
    for k in range(1, 12):
        b = next(b for b in range(100) if 2**b >= levels**k)
        if 8 <= b <= 56:
            words.append((Fraction(b, k), b % 8 > 0, b, k))
    return min(words)[3], min(words)[2]


def naive_pack(codes: list[int], levels: int) -> bytes:
    """The module's docstring, digit by digit."""
    k, b = naive_word(levels)
    bits = ""
    for start in range(0, len(codes), k):
        digits = codes[start : start + k]
        word = sum(c * levels**j for j, c in enumerate(digits))
        width = b if len(digits) == k else next(n for n in range(100) if 2**n >= levels ** len(digits))
        bits += f"{word:0{width}b}"[::-1]
    return int("0" + bits[::-1], 2).to_bytes(math.ceil(len(bits) / 8), "little")


@examples
@given(shapes, layouts, seeds, st.integers(2, 256), st.sampled_from([1, 3, 7, 256]))
def test_codes_give_back_every_bit_and_match_the_naive_twin(shape, layout, seed, levels, block):
    codec = QuantizedCodec(levels, block)
    value = random_coded(codec, shape, layout, seed)
    codes, scales = value.codes.clone(), value.scales.clone()
    back = there_and_back(codec, value)
    assert back.codes.dtype == torch.uint8
    assert back.codes.shape == codes.shape
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scales, scales)
    assert torch.equal(value.codes, codes)
    assert torch.equal(value.scales, scales)
    assert joined(codec, value) == scales.numpy().tobytes() + naive_pack(codes.flatten().tolist(), levels)


@pytest.mark.parametrize("levels", [2, 3, 5, 17, 129, 256])
@pytest.mark.parametrize("count", [2**17 - 1, 2 * 2**17 + 77])
def test_codes_across_chunks_match_the_naive_twin(levels, count):
    codec = QuantizedCodec(levels)
    value = random_coded(codec, (count,), seed=levels)
    back = there_and_back(codec, value)
    assert torch.equal(back.codes, value.codes)
    assert joined(codec, value)[4 * len(value.scales) :] == naive_pack(value.codes.tolist(), levels)


@pytest.mark.parametrize("levels", [2, 3, 5, 17, 256])
def test_any_number_of_codes_around_a_word_a_row_and_a_chunk(levels):
    codec, row = QuantizedCodec(levels), 8 * code_word(levels)[0]
    chunk = 2**17 // row * row
    counts = [*range(2 * row + 2), *range(chunk - 2, chunk + 3), 2 * chunk]
    for count in counts:
        value = random_coded(codec, (count,), seed=count)
        value.codes[-1:] = levels - 1
        assert torch.equal(there_and_back(codec, value).codes, value.codes)


def test_codes_bytes_by_hand():
    """12 scales, and 3000 / 6 words of 14 bits: 48 + 875 bytes, of which the codes take 7 / 3 bits each."""
    assert QuantizedCodec(5).nbytes((3000,)) == 923
    assert len(joined(QuantizedCodec(5), random_coded(QuantizedCodec(5), (30, 100)))) == 923
    assert code_word(5) == (6, 14)
    assert Fraction(14, 6) < Fraction("2.34")
    # levels: codes a word, bits a word
    by_hand = {2: (8, 8), 3: (5, 8), 4: (4, 8), 9: (11, 35), 15: (11, 43), 16: (2, 8), 17: (11, 45), 256: (1, 8)}
    assert {levels: code_word(levels) for levels in by_hand} == by_hand
    # 3 levels: 1 + 2*3 + 0*9 + 1*27 + 2*81 = 196, then 2 + 1*3 = 5 in ceil(2 log2 3) = 4 bits
    value = QuantizedTensor(torch.tensor([1, 2, 0, 1, 2, 2, 1], dtype=torch.uint8), torch.tensor([1.0]))
    assert joined(QuantizedCodec(3), value) == bytes.fromhex("0000803f") + bytes([196, 5])
    # 8 levels, 3 bits a code: 5 + 1*8 + 7*64 = 461 = 0x1cd
    value = QuantizedTensor(torch.tensor([5, 1, 7], dtype=torch.uint8), torch.tensor([-0.0]))
    assert joined(QuantizedCodec(8), value) == bytes.fromhex("00000080 cd01")
    assert there_and_back(QuantizedCodec(8), value).scales.signbit().item()
    assert QuantizedCodec(17, 64).name == "codes 17 block 64"


@pytest.mark.parametrize("block", [64, 256])
def test_bits_per_weight_are_within_two_percent_for_every_number_of_levels(block):
    count = 102_400
    for levels in range(2, 257):
        codec = QuantizedCodec(levels, block)
        bits = 8 * len(joined(codec, random_coded(codec, (count,), seed=levels))) / count
        assert bits <= 1.02 * math.log2(levels) + 32 / block, levels
        assert bits >= math.log2(levels) + 32 / block, levels


def crafted(packed: bytes, scale: float = 1.0) -> memoryview:
    return memoryview(np.float32(scale).tobytes() + packed)


@pytest.mark.parametrize(
    "levels,count,data,match",
    [
        (3, 5, crafted(b""), "expected 5 bytes for codes 3 block 256 of shape .5,., found 4"),
        (3, 5, crafted(b"\x00\x00"), "expected 5 bytes .* found 6"),
        (3, 0, memoryview(b"\x00"), "expected 0 bytes .* found 1"),
        (3, 5, crafted(bytes([243])), "expected 5 codes below 3 in a word of 8 bits, found the word 0xf3"),
        (5, 6, crafted((5**6).to_bytes(2, "little")), "expected 6 codes below 5 in a word of 14 bits"),
        (17, 11, crafted((17**11).to_bytes(6, "little")), "expected 11 codes below 17"),
        (255, 1, crafted(bytes([255])), "expected 1 codes below 255"),
        (5, 1, crafted(bytes([5])), "the bits after the last of 1 codes below 5 must be zero"),
        (5, 6, crafted((1 << 14).to_bytes(2, "little")), "the bits after the last of 6 codes"),
        (2, 3, crafted(bytes([8])), "the bits after the last of 3 codes"),
        (2, 3, crafted(bytes([7]), math.nan), "expected finite values of at least 0, found nan at 0"),
        (2, 3, crafted(bytes([7]), math.inf), "expected finite values of at least 0, found inf at 0"),
        (2, 3, crafted(bytes([7]), -1.5), "expected finite values of at least 0, found -1.5 at 0"),
    ],
)
def test_codes_refuse_bytes(levels, count, data, match):
    with pytest.raises(WireError, match=match):
        QuantizedCodec(levels).decode(data, (count,))


def test_the_last_valid_word_is_not_refused():
    assert QuantizedCodec(3).decode(crafted(bytes([242])), (5,)).codes.tolist() == [2] * 5
    assert QuantizedCodec(5).decode(crafted(bytes([4])), (1,)).codes.tolist() == [4]


def test_a_code_too_large_is_found_in_any_chunk():
    codec, count = QuantizedCodec(3), 3 * 2**17
    data = bytearray(joined(codec, random_coded(codec, (count,))))
    data[-40] = 255
    with pytest.raises(WireError, match="found the word 0xff"):
        codec.decode(memoryview(data), (count,))
    value = random_coded(codec, (count,))
    value.codes[-200] = 3
    with pytest.raises(WireError, match="expected values below 3, found 3"):
        codec.encode(value)


@pytest.mark.parametrize(
    "value,match",
    [
        (
            QuantizedTensor(torch.tensor([0, 5], dtype=torch.uint8), torch.ones(1)),
            "codes: expected values below 5, found 5",
        ),
        (QuantizedTensor(torch.tensor([0, 4]), torch.ones(1)), "codes: expected uint8, found int64"),
        (
            QuantizedTensor(torch.tensor([0], dtype=torch.uint8), torch.ones(1).half()),
            "scales: expected float32, found float16",
        ),
        (
            QuantizedTensor(torch.tensor([0], dtype=torch.uint8), torch.ones(2)),
            "scales: expected shape .1,., found .2,.",
        ),
        (QuantizedTensor(torch.tensor([0], dtype=torch.uint8), torch.ones(())), "scales: expected shape"),
        (QuantizedTensor(torch.tensor([0], dtype=torch.uint8), torch.tensor([math.nan])), "scales: expected finite"),
        (QuantizedTensor(torch.tensor([0], dtype=torch.uint8), torch.tensor([-2.0])), "found -2.0 at 0"),
        (torch.zeros(3, dtype=torch.uint8), "expected codes with their scales, found Tensor"),
    ],
)
def test_codes_refuse_values(value, match):
    with pytest.raises(WireError, match=match):
        QuantizedCodec(5).encode(value)


@pytest.mark.long
@pytest.mark.parametrize("levels", [2, 3, 5, 9, 15, 16, 17, 33, 255, 256])
@pytest.mark.parametrize("count", [0, 1, 87, 89, 1000, 4096])
def test_codes_on_another_device_have_the_same_bytes(monkeypatch, levels, count):
    monkeypatch.setattr("fedveil.wire.quantized._CODES_THERE", 500)
    codec = QuantizedCodec(levels, 64)
    value = random_coded(codec, (count,))
    data = joined(codec, value)
    with Pretended() as pretended:
        there = QuantizedTensor(value.codes.to(DEVICE), value.scales.to(DEVICE))
        assert joined(codec, there) == data
        assert sum(pretended.back) == len(data)
        back = codec.decode_on(memoryview(data), (count,), DEVICE)
        assert (back.codes.device, back.scales.device) == (DEVICE, DEVICE)
    assert torch.equal(back.codes.values, value.codes)
    assert torch.equal(back.scales.values, value.scales)


@pytest.mark.parametrize("levels", [3, 5, 9, 17])
def test_codes_on_another_device_refuse_what_those_on_the_cpu_do(levels):
    """Every byte in turn with every bit changed: refused by both, with the same words, or by none."""
    codec = QuantizedCodec(levels, 64)
    data = joined(codec, random_coded(codec, (30,)))
    refused = 0
    for at in range(4, len(data)):
        for bit in range(8):
            other = bytearray(data)
            other[at] ^= 1 << bit
            messages = [
                said_by(decode, other)
                for decode in (codec.decode, lambda *of: codec.decode_on(*of, torch.device("cpu")))
            ]
            assert messages[0] == messages[1]
            refused += bool(messages[0])
    assert refused
    with Pretended(), pytest.raises(WireError, match=f"codes: expected values below {levels}, found {levels}"):
        codec.encode(QuantizedTensor(torch.full((30,), levels, dtype=torch.uint8).to(DEVICE), torch.ones(1).to(DEVICE)))


def said_by(decode, data) -> str:
    try:
        decode(memoryview(data), (30,))
    except WireError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("count", [0, 1, 8, 9, 1001])
def test_bits_on_another_device_have_the_same_bytes(count):
    entries = random_integers((count,), "contiguous", 3, 0, 2).bool()
    with Pretended() as pretended:
        assert joined(BitCodec(), entries.to(DEVICE)) == joined(BitCodec(), entries)
        assert sum(pretended.back) == BitCodec().nbytes((count,))


def test_codes_refuse_configurations():
    for levels in (-1, 0, 1, 257):
        with pytest.raises(ConfigError, match=f"levels: expected 2 to 256, found {levels}"):
            QuantizedCodec(levels)
    with pytest.raises(ConfigError, match="block: expected at least 1, found 0"):
        QuantizedCodec(2, 0)


# --- seeded ---


def test_seeded_is_the_key():
    codec = SeededMaskCodec(0.25)
    assert joined(codec, KEY) == KEY
    assert codec.shape(KEY) == (32,)
    assert there_and_back(codec, KEY) == KEY
    assert type(codec.decode(memoryview(KEY), (32,))) is bytes
    assert [codec.nbytes(s) for s in [(), (0,), (1000, 1000)]] == [32, 32, 32]
    assert [SeededMaskCodec(p).name for p in (0.25, 1, 0.1 + 0.2)] == [
        "seeded chacha20 keep 0.25",
        "seeded chacha20 keep 1.0",
        "seeded chacha20 keep 0.30000000000000004",
    ]


def test_seeded_refuses():
    codec = SeededMaskCodec(0.5)
    for data in (KEY[:31], KEY + b"\x00", b""):
        with pytest.raises(WireError, match=f"expected a key of 32 bytes, found {len(data)}"):
            codec.decode(memoryview(data), (32,))
        with pytest.raises(WireError, match=f"expected a key of 32 bytes, found {len(data)}"):
            codec.encode(data)
    with pytest.raises(WireError, match="expected a key of 32 bytes, found Tensor"):
        codec.encode(torch.ones(32, dtype=torch.bool))
    for keep in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="keep: expected 0 to 1"):
            SeededMaskCodec(keep)
