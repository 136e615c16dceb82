from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.algebra.mean import WeightedMean


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    counts=st.lists(st.integers(1, 10**8), min_size=1, max_size=9),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_agrees_with_the_naive_mean_in_float64(shape, counts, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in counts]
    mean = WeightedMean()
    for value, n in zip(values, counts, strict=True):
        mean.add({"w": value}, n)
    naive = sum((v.double() * n for v, n in zip(values, counts, strict=True)), torch.zeros(shape, dtype=torch.float64))
    result = mean.result({"w": torch.zeros(shape)})["w"]
    torch.testing.assert_close(result, (naive / sum(counts)).float(), rtol=1e-5, atol=1e-6)
    assert mean.weight("w") == sum(counts)


def test_widening_block_by_block_equals_widening_as_a_whole():
    """More entries than one block, so that a block boundary is crossed."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(600_001, generator=generator).bfloat16() for _ in range(2))
    blocks, whole = WeightedMean(), WeightedMean()
    for value, n in ((first, 3), (second, 5)):
        blocks.add({"w": value}, n)
        whole.add({"w": value.float()}, n)
    assert torch.equal(blocks.result({"w": first.float()})["w"], whole.result({"w": first.float()})["w"])


def test_inputs_are_only_read_and_a_missing_name_stays_the_same_tensor():
    value, old = torch.ones(3), {"w": torch.zeros(3), "other": torch.full((2,), 7.0)}
    mean = WeightedMean()
    mean.add({"w": value}, 2)
    mean.add({"w": value * 3}, 2)
    result = mean.result(old)
    assert result["other"] is old["other"]
    assert result["w"].tolist() == [2.0] * 3
    assert value.tolist() == [1.0] * 3
    assert mean.weight("other") == 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_above_zero(weight):
    with pytest.raises(ValueError, match="expected a number above 0"):
        WeightedMean().add({"w": torch.ones(1)}, weight)
