"""The same masks, codes and values on a GPU as on a CPU. Imports little, so that it runs where little is installed."""

from __future__ import annotations

import pytest
import torch

from fedveil.algebra import masks
from fedveil.algebra.quantise import Quantiser
from fedveil.contract.codec import Coded
from fedveil.rng import Stream

KEY = bytes(range(32))
ALL = [("nf_sym", w) for w in range(1, 5)] + [("nf", w) for w in range(1, 5)] + [("absmax", w) for w in range(2, 9)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
def test_masked_entries_are_packed_and_put_back_bit_for_bit(gpu, dtype, keep):
    value = random(700, 401).to(dtype).T  # not contiguous
    mask = Stream(KEY).bernoulli(keep, (401, 700))
    packed, there = masks.pack(value, mask), masks.pack(value.to(gpu), mask)
    assert there.device.type == gpu
    assert torch.equal(there.cpu(), packed)
    back = masks.unpack("w", there, mask)
    assert back.device.type == gpu
    assert torch.equal(back.cpu(), masks.unpack("w", packed, mask))
    assert torch.equal(back.cpu(), value * mask)


@pytest.mark.gpu
def test_the_mask_itself_does_not_depend_on_where_the_values_are(gpu):
    """It is drawn on the CPU from its key, so that a server without a GPU and a site with one have the same."""
    (name, mask), *none = masks.expanded({0.5: KEY}, {"w": 0.5}, {"w": (64, 33)})
    assert (name, none) == ("w", [])
    assert mask.device.type == "cpu"
    ones = torch.ones(64, 33, device=gpu)
    assert torch.equal(masks.unpack("w", masks.pack(ones, mask), mask).cpu(), mask.float())


@pytest.mark.gpu
@pytest.mark.parametrize("block", [256, 250])  # with a kernel of bitsandbytes on CUDA, and without
@pytest.mark.parametrize("table,bits", ALL)
def test_codes_are_those_of_the_cpu(gpu, table, bits, block):
    """Bit for bit, except for values within rounding of halfway between two levels."""
    how, x = Quantiser(table, bits, block), random(256 * 400 + 31)
    x[512:768] = 0
    mine, theirs = how.quantise(x), how.quantise(x.to(gpu))
    assert theirs.codes.device.type == gpu
    assert torch.equal(mine.scales, theirs.scales.cpu())
    off = mine.codes != theirs.codes.cpu()
    assert float(off.float().mean()) < 1e-4
    middles = [(low + high) / 2 for low, high in zip(how.levels, how.levels[1:], strict=False)]
    scales = mine.scales.repeat_interleave(block)[: len(x)]
    for value in (x / scales)[off].tolist():
        assert min(abs(value - middle) for middle in middles) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("table,bits", ALL)
def test_the_same_codes_decode_bit_for_bit(gpu, table, bits):
    how = Quantiser(table, bits)
    coded = how.quantise(random(3, 85_001))
    there = how.dequantise(Coded(coded.codes.to(gpu), coded.scales.to(gpu)))
    assert there.device.type == gpu
    assert torch.equal(there.cpu(), how.dequantise(coded))


@pytest.mark.gpu
def test_what_a_gpu_coded_goes_over_the_wire_as_what_a_cpu_coded(gpu):
    how = Quantiser("absmax", 4)
    coded = how.quantise(random(5000))
    there = Coded(coded.codes.to(gpu), coded.scales.to(gpu))
    assert b"".join(how.codec.encode(there)) == b"".join(how.codec.encode(coded))
