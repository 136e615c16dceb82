from __future__ import annotations

import bitsandbytes.functional as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError, TaskError
from fedveil.ops.quantization import BlockQuantizer

ALL = [("nf_sym", w) for w in range(1, 5)] + [("nf", w) for w in range(1, 5)] + [("absmax", w) for w in range(2, 9)]


def naive(x: torch.Tensor, how: BlockQuantizer) -> torch.Tensor:
    """Entry by entry, in double."""
    out = []
    for start in range(0, len(x), how.block):
        block = x[start : start + how.block].double()
        scale = max(abs(v) for v in block.tolist())
        for v in block.tolist():
            out.append(scale * min(how.levels, key=lambda q: abs(q - v / scale)) if scale else 0.0)
    return torch.tensor(out)


@pytest.mark.parametrize(
    "table,bits,positive",
    [
        ("nf_sym", 1, [1.0]),
        ("nf_sym", 2, [0.338, 1.0]),
        ("nf_sym", 3, [0.161, 0.338, 0.563, 1.0]),
        ("absmax", 2, [1.0]),
        ("absmax", 3, [1 / 3, 2 / 3, 1.0]),
    ],
)
def test_symmetric_tables_by_hand(table, bits, positive):
    levels = BlockQuantizer(table, bits).levels
    assert levels == pytest.approx([*(-v for v in reversed(positive)), 0.0, *positive], abs=6e-4)


def test_numbers_of_levels():
    assert [len(BlockQuantizer("nf_sym", w).levels) for w in (1, 2, 3, 4)] == [3, 5, 9, 17]
    assert [len(BlockQuantizer("nf", w).levels) for w in (1, 2, 3, 4)] == [3, 4, 8, 16]
    assert [len(BlockQuantizer("absmax", w).levels) for w in (2, 4, 8)] == [3, 15, 255]
    assert BlockQuantizer("nf", 2).levels == pytest.approx([-1, 0, 0.338, 1], abs=6e-4)


def test_nf_of_4_bits_is_nf4():
    theirs = sorted(reference.get_4bit_type("nf4", device="cpu").tolist())
    assert BlockQuantizer("nf", 4).levels == pytest.approx(theirs, abs=2e-5)


@pytest.mark.parametrize("table,bits", ALL)
def test_as_the_naive_twin(table, bits):
    """No random entry lies halfway between two levels."""
    x = torch.randn(523, generator=torch.Generator().manual_seed(bits))
    x[64:96] = 0
    how = BlockQuantizer(table, bits, block=32)
    coded = how.quantise(x)
    torch.testing.assert_close(how.dequantise(coded), naive(x, how).float(), rtol=1e-6, atol=1e-7)
    assert int(coded.codes.max()) == len(how.levels) - 1
    assert coded.scales[2] == 0
    assert bool((coded.codes[64:96] == how.levels.index(0.0)).all())
    assert len(coded.scales) == 17


TABLES: list[torch.Tensor] = []


@pytest.mark.parametrize("table,bits", ALL)
def test_as_bitsandbytes_with_our_table(table, bits):
    """Except for entries about halfway between two levels: one in 10,000, more where the CPU's code is coarser."""
    how = BlockQuantizer(table, bits)
    x = torch.randn(256 * 400, generator=torch.Generator().manual_seed(7))
    code = torch.tensor([*how.levels, *[1.0] * (256 - len(how.levels))])
    TABLES.append(code)  # on the CPU bitsandbytes remembers a table by its address: a freed one is taken for the next
    codes, state = reference.quantize_blockwise(x, code=code, blocksize=256)
    mine = how.quantise(x)
    assert torch.equal(mine.scales, state.absmax)
    off = (codes.clamp(max=len(how.levels) - 1).int() - mine.codes.int()).abs()
    assert int(off.max()) <= 1
    assert float(off.float().mean()) < (1e-4 if len(how.levels) < 20 else 2e-3)


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(ALL), block=st.integers(1, 70), count=st.integers(0, 40000), exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_properties(how, block, count, exponent, dtype):
    quantiser = BlockQuantizer(*how, block=block)
    x = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 2.0**exponent).to(dtype)
    x[::3] = 0
    coded = quantiser.quantise(x)
    back = quantiser.dequantise(coded)
    widest = max(b - a for a, b in zip(quantiser.levels, quantiser.levels[1:], strict=False))
    scale = coded.scales.repeat_interleave(block)[:count]
    assert bool(((back - x.float()).abs() <= scale * (widest / 2 + 1e-6)).all())
    assert bool((back[::3] == 0).all())
    again = quantiser.quantise(back)
    assert torch.equal(again.codes, coded.codes)  # what is on a level stays there
    assert torch.equal(again.scales, coded.scales)
    data = b"".join(quantiser.codec.encode(coded))
    decoded = quantiser.codec.decode(memoryview(data), (count,))
    assert torch.equal(decoded.codes, coded.codes)
    assert torch.equal(decoded.scales, coded.scales)


def test_five_levels_cost_at_most_2_34_bits():
    how, count = BlockQuantizer("nf_sym", 2), 256 * 3000
    coded = how.quantise(torch.randn(count))
    assert (sum(len(p) for p in how.codec.encode(coded)) - 4 * 3000) * 8 / count <= 2.34


def test_halfway_goes_down_and_eq_4_rounds_to_even():
    low = BlockQuantizer("nf_sym", 1).quantise(torch.tensor([1.0, 0.5, -0.5]))
    assert low.codes.tolist() == [2, 1, 0]
    even = BlockQuantizer("absmax", 3).quantise(torch.tensor([3.0, 0.5, 1.5, -0.5, -1.5]))
    assert (even.codes.int() - 3).tolist() == [3, 0, 2, 0, -2]


def test_shape_and_empty():
    how = BlockQuantizer("nf_sym", 2, block=4)
    assert how.quantise(torch.ones(3, 5)).codes.shape == (3, 5)
    assert how.dequantise(how.quantise(torch.ones(3, 5))).tolist() == [[1.0] * 5] * 3
    assert how.dequantise(how.quantise(torch.empty(0, 5))).shape == (0, 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(TaskError, match="NaN or infinity"):
        BlockQuantizer().quantise(torch.tensor([1.0, bad]))


@pytest.mark.parametrize(
    "table,bits,block,named",
    [
        ("absmax", 1, 256, "every weight 0"),
        ("absmax", 9, 256, "bits"),
        ("nf_sym", 5, 256, "bits"),
        ("nf_sym", 0, 256, "bits"),
        ("nf_sym", 2, 0, "block"),
        ("nf_sym", 2, -4, "block"),
    ],
)
def test_bad_input_is_refused(table, bits, block, named):
    with pytest.raises(ConfigError, match=named):
        BlockQuantizer(table, bits, block)


@pytest.mark.long
@pytest.mark.parametrize("table,bits", [("nf_sym", 2), ("absmax", 4)])
def test_threads_change_nothing(table, bits):
    """Three chunks and a short block, by one thread and by three; torch has as many as before."""
    how, before = BlockQuantizer(table, bits, 250), torch.get_num_threads()
    x = torch.randn(2 * (1 << 17) + 77, generator=torch.Generator().manual_seed(5))
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            coded = how.quantise(x)
            results.append((coded.codes, coded.scales, how.dequantise(coded)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.testing.assert_close(results[0][2], naive(x, how).float(), rtol=1e-6, atol=1e-7)
