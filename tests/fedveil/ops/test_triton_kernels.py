"""The kernels for GPUs, on the CPU by Triton's interpreter: bit for bit what is computed without them.

Triton decides as it is imported whether it interprets, so the tests below run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from fedveil import rng
from fedveil.ops import chacha20, random_masks
from fedveil.ops.quantization import BlockQuantizer
from tests.conftest import ROOT

KEY = bytes(range(7, 39))
CPU = torch.device("cpu")
ALL = [("nf_sym", w) for w in range(1, 5)] + [("nf", w) for w in range(1, 5)] + [("absmax", w) for w in range(2, 9)]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_all_of_this_file_by_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is missing: it comes with torch's build for CUDA")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout
    assert " passed, 15 skipped" in done.stdout  # this one, and what compiles


INTEGERS, LANES = {"out": "*i32", "state": "*i32"}, {"LANES": 128}
SIGNATURES = {  # as the launches in triton_kernels.py have them
    "_draw": (INTEGERS | {"tied": "*i32", "splat": "i32"}, LANES | {"TIES": True}),
    "_words": (INTEGERS, LANES),
    "_settle": ({"drawn": "*i32", "words": "*i32", "ends": "*i64", "rest": "i32"}, {"SIZE": 2048}),
    "_count": ({"mask": "*u8", "counts": "*i32", "n": "i32"}, {"SIZE": 2048}),
    "_gather": ({"values": "*i16", "mask": "*u8", "ends": "*i64", "out": "*i16", "n": "i64"}, {"SIZE": 2048}),
    "_scatter": ({"values": "*i32", "mask": "*u8", "ends": "*i64", "out": "*i32", "n": "i32"}, {"SIZE": 2048}),
    "_code": (
        {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "edges": "*fp32", "n": "i32"},
        {"block": 250, "half": 7, "MIDDLES": 4, "WIDE": 256, "ROWS": 16},
    ),
}


@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SIGNATURES)
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(name, capability):
    triton = pytest.importorskip("triton", reason="Triton comes with torch's build for CUDA")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedveil.ops import triton_kernels

    of, constants = SIGNATURES[name]
    kernel = getattr(triton_kernels, name)
    signature = {a: of.get(a, "constexpr") for a in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    assert "fma.rn" not in made.asm["ptx"]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    if not INTERPRETED:
        pytest.skip("runs in a process of its own")
    from fedveil.ops import triton_kernels

    return triton_kernels


def random(count: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_the_trial_runs_all_of_them(kernels):
    kernels.self_test(CPU)


@pytest.mark.parametrize("count", [1, 8192, 20_001])
@pytest.mark.parametrize("keep", [0.5, 0.2, 0.7312345, 1 / 256 + 1e-9, 255.5 / 256, 1e-9])
def test_masks(kernels, keep, count):
    mask = kernels.draw_mask(chacha20.cipher_states(KEY, 2**40 + 3), *rng.probability_threshold(keep), count)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, random_masks.expand_mask(KEY, keep, (count,), 2**40 + 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 10_001])
def test_packing(kernels, count, dtype):
    values, mask = random(count).to(dtype), random_masks.expand_mask(KEY, 0.3, (count,))
    packed = kernels.pack_masked(random_masks._integers(values), mask)
    assert torch.equal(packed.view(dtype), random_masks.pack_masked(values, mask))
    ends, ones = kernels.count_masked(mask)
    assert ones == len(packed)
    assert torch.equal(kernels.unpack_masked(packed, mask, ends).view(dtype), values * mask)


def test_what_is_not_contiguous(kernels):
    values, mask = random(12_000)[::3], random_masks.expand_mask(KEY, 0.3, (8000,))[::2]
    assert not values.is_contiguous()
    packed = kernels.pack_masked(random_masks._integers(values), mask)
    assert torch.equal(packed.view(torch.float32), random_masks.pack_masked(values.clone(), mask.clone()))
    back = kernels.unpack_masked(packed, mask, kernels.count_masked(mask)[0])
    assert torch.equal(back.view(torch.float32), values * mask)
    how = BlockQuantizer("nf_sym", 2)
    assert torch.equal(kernels.quantize_blocks(values, 256, 1, how._middles)[0], how.coded(values).codes)


def halfway(how: BlockQuantizer, count: int) -> torch.Tensor:
    """Entries of 1 and of what lies halfway between two steps, in which rounding shows."""
    half = 2 ** (how.bits - 1) - 1 or 1
    x = (torch.arange(count) % (2 * half + 1) - half + 0.5) / half
    x[:: how.block] = 1.0
    return x


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("block,dtype", [(256, torch.float32), (250, torch.bfloat16), (1, torch.float16)])
@pytest.mark.parametrize("table,bits", ALL)
def test_codes(kernels, table, bits, block, dtype):
    how = BlockQuantizer(table, bits, block)
    for x in (random(17 * 256 + 31), halfway(how, 5 * 256)):
        x = x.to(dtype)
        x[512:900] = 0
        here = how.coded(x)
        codes, scales = kernels.quantize_blocks(x, block, 2 ** (bits - 1) - 1, how._middles)
        assert torch.equal(codes, here.codes)
        assert torch.equal(scales, here.scales)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_in_its_blocks_scale(kernels, value):
    x = random(600)
    x[300] = value
    _, scales = kernels.quantize_blocks(x, 256, 1, ())
    assert torch.isfinite(scales).tolist() == [True, False, True]
    assert kernels.quantize_blocks(x[:0], 256, 1, ())[0].shape == (0,)
