"""The same masks, codes and values on a GPU as on a CPU. Imports little, so that it runs where little is installed."""

from __future__ import annotations

import pytest
import torch

from fedveil.contract.codec import QuantizedTensor
from fedveil.errors import TaskError
from fedveil.ops import random_masks, triton_available
from fedveil.ops.quantization import BlockQuantizer
from fedveil.rng import RandomStream
from fedveil.wire.bits import BitCodec

KEY = bytes(range(32))
ALL = [("nf_sym", w) for w in range(1, 5)] + [("nf", w) for w in range(1, 5)] + [("absmax", w) for w in range(2, 9)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
def test_masked_entries_are_packed_and_put_back_bit_for_bit(gpu, dtype, keep):
    value = random(700, 401).to(dtype).T  # not contiguous
    mask = RandomStream(KEY).bernoulli(keep, (401, 700))
    packed, there = random_masks.pack_masked(value, mask), random_masks.pack_masked(value.to(gpu), mask)
    assert there.device.type == gpu
    assert torch.equal(there.cpu(), packed)
    back = random_masks.unpack_masked("w", there, mask)
    assert back.device.type == gpu
    assert torch.equal(back.cpu(), random_masks.unpack_masked("w", packed, mask))
    assert torch.equal(back.cpu(), value * mask)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [0.5, 0.2, 0.7312345, 255.5 / 256, 1e-9, 1 - 1e-12, 0.0, 1.0])
@pytest.mark.parametrize("shape", [(), (0, 3), (64, 33), (8193,), (3, 1_000_003)])
def test_a_mask_is_that_of_the_cpu(gpu, keep, shape):
    """So that a server without a GPU and a site with one have the same."""
    there = random_masks.expand_mask(KEY, keep, shape, 7, torch.device(gpu))
    assert there.device.type == gpu
    assert torch.equal(there.cpu(), random_masks.expand_mask(KEY, keep, shape, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [0.5, 0.2])
def test_a_mask_is_that_of_the_cpu_without_kernels_too(gpu, monkeypatch, keep):
    monkeypatch.setattr("fedveil.ops.triton_available.load_kernels", lambda device: None)
    masks = random_masks.expand_masks(
        {keep: KEY}, {"w": keep, "v": keep}, {"w": (700, 401), "v": (5,)}, torch.device(gpu)
    )
    here = dict(random_masks.expand_masks({keep: KEY}, {"w": keep, "v": keep}, {"w": (700, 401), "v": (5,)}))
    assert all(torch.equal(there.cpu(), here[name]) for name, there in masks)
    values, mask = random(700, 401).to(gpu), here["w"]
    assert torch.equal(
        random_masks.unpack_masked("w", random_masks.pack_masked(values, mask), mask).cpu(), values.cpu() * mask
    )
    how = BlockQuantizer("nf_sym", 2)
    assert torch.equal(how.quantise(values).codes.cpu(), how.quantise(values.cpu()).codes)


@pytest.mark.gpu
def test_kernels_work_here_or_the_log_says_why_not(gpu):
    """Without them all is right, and slower: what a GPU's bounds in the presets cannot be held with."""
    if triton_available.load_kernels(torch.device(gpu)) is None:
        pytest.skip("kernels do not work here: no CUDA, no Triton or no C compiler; a warning says what is missing")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [256, 250])
@pytest.mark.parametrize("table,bits", ALL)
def test_codes_are_those_of_the_cpu(gpu, table, bits, block, dtype):
    """Bit for bit, also halfway between two steps."""
    how = BlockQuantizer(table, bits, block)
    half = 2 ** (bits - 1) - 1 or 1
    steps = (torch.arange(5 * block) % (2 * half + 1) - half + 0.5) / half
    steps[::block] = 1.0
    for x in (random(256 * 400 + 31), steps):
        x = x.to(dtype)
        x[512:768] = 0
        mine, theirs = how.quantise(x), how.quantise(x.to(gpu))
        assert theirs.codes.device.type == gpu
        assert torch.equal(mine.scales, theirs.scales.cpu())
        assert torch.equal(mine.codes, theirs.codes.cpu())


@pytest.mark.gpu
def test_what_is_not_finite_is_refused_there_too(gpu):
    for value in (torch.nan, torch.inf):
        x = random(600)
        x[300] = value
        with pytest.raises(TaskError, match="cannot quantize NaN or infinity"):
            BlockQuantizer("absmax", 4).quantise(x.to(gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("table,bits", ALL)
def test_the_same_codes_decode_bit_for_bit(gpu, table, bits):
    how = BlockQuantizer(table, bits)
    coded = how.quantise(random(3, 85_001))
    there = how.dequantise(QuantizedTensor(coded.codes.to(gpu), coded.scales.to(gpu)))
    assert there.device.type == gpu
    assert torch.equal(there.cpu(), how.dequantise(coded))


@pytest.mark.gpu
def test_what_a_gpu_coded_goes_over_the_wire_as_what_a_cpu_coded(gpu):
    how = BlockQuantizer("absmax", 4)
    coded = how.quantise(random(5000))
    there, data = QuantizedTensor(coded.codes.to(gpu), coded.scales.to(gpu)), b"".join(how.codec.encode(coded))
    assert b"".join(how.codec.encode(there)) == data
    back = how.codec.decode_on(memoryview(data), (5000,), torch.device(gpu))
    assert back.codes.device.type == gpu
    assert torch.equal(back.codes.cpu(), coded.codes)
    mask = random_masks.expand_mask(KEY, 0.3, (5001,))
    assert BitCodec().encode(mask.to(gpu))[0].tobytes() == BitCodec().encode(mask)[0].tobytes()
