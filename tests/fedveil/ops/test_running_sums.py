from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.ops.running_sums import RunningSums
from fedveil.rng import RandomStream


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
    mean = RunningSums()
    for value, n in zip(values, counts, strict=True):
        mean.fold("w", value, n)
    naive = sum((v.double() * n for v, n in zip(values, counts, strict=True)), torch.zeros(shape, dtype=torch.float64))
    result = mean.means({"w": torch.zeros(shape)})["w"]
    torch.testing.assert_close(result, (naive / sum(counts)).float(), rtol=1e-5, atol=1e-6)
    assert mean.weight("w") == sum(counts)


def test_widening_block_by_block_equals_widening_as_a_whole():
    """More entries than one block, so that a block boundary is crossed."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(600_001, generator=generator).bfloat16() for _ in range(2))
    blocks, whole = RunningSums(), RunningSums()
    for value, n in ((first, 3), (second, 5)):
        blocks.fold("w", value, n)
        whole.fold("w", value.float(), n)
    assert torch.equal(blocks.means({"w": first.float()})["w"], whole.means({"w": first.float()})["w"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (262_144,), (262_145,), (3, 200_003)])
def test_folded_half_precision_has_the_bits_of_one_lerp_of_the_whole_tensor(dtype, shape):
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    mean, expected, total = RunningSums(), values[0].float(), 3.0
    mean.fold("w", values[0], 3.0)
    for weight, value in zip((17.0, 1e6, 5.0), values[1:], strict=True):
        mean.fold("w", value, weight)
        total += weight
        expected.lerp_(value.float(), weight / total)
    assert torch.equal(mean.mean("w"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_lie_transposed_in_memory_count_too(dtype):
    mean = RunningSums()
    for value in (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])):
        mean.fold("w", value.to(dtype).T, 1.0)
    assert mean.mean("w").tolist() == [[3.0, 5.0], [4.0, 6.0]]


def test_inputs_are_only_read_and_a_missing_name_stays_the_same_tensor():
    value, old = torch.ones(3), {"w": torch.zeros(3), "other": torch.full((2,), 7.0)}
    mean = RunningSums()
    mean.fold("w", value, 2)
    mean.fold("w", value * 3, 2)
    result = mean.means(old)
    assert result["other"] is old["other"]
    assert result["w"].tolist() == [2.0] * 3
    assert value.tolist() == [1.0] * 3
    assert mean.weight("other") == 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_above_zero(weight):
    with pytest.raises(ValueError, match="expected a number above 0"):
        RunningSums().fold("w", torch.ones(1), weight)


def random(*shape, seed=1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_mean_by_hand():
    """Entry 0: (1 + 4) / 2. Entry 1: 6 alone. Entry 2: nobody. Entry 3: a true zero counts, (8 + 0) / 2."""
    mean = RunningSums()
    mean.fold("w", torch.tensor([1.0, 2.0, 3.0, 8.0]), 1.0, torch.tensor([True, False, False, True]))
    mean.fold("w", torch.tensor([4.0, 6.0, 7.0, 0.0]), 1.0, torch.tensor([True, True, False, True]))
    assert mean.mean("w").tolist() == [2.5, 6.0, 0.0, 4.0]
    assert mean.moved("w").tolist() == [True, True, False, True]
    assert "w" in mean
    assert "v" not in mean


def test_mean_with_weights_by_hand():
    """Entry 0: (3 * 1 + 1 * 5) / 4. Entry 1: 5 alone, whatever its weight."""
    mean = RunningSums()
    mean.fold("w", torch.tensor([1.0, 9.0]), 3.0, torch.tensor([True, False]))
    mean.fold("w", torch.tensor([5.0, 5.0]), 1.0, torch.tensor([True, True]))
    assert mean.mean("w").tolist() == [2.0, 5.0]


@pytest.mark.parametrize("weights", [[1.0] * 7, [3.0, 1e6, 17.0, 1.0, 29.0, 5.0, 2.0]])
def test_all_ones_no_mask_and_the_weighted_mean_agree_bit_for_bit(weights):
    values = [random(41, 3, seed=i) for i in range(7)]
    ones, none, plain = RunningSums(), RunningSums(), RunningSums()
    for value, weight in zip(values, weights, strict=True):
        ones.fold("w", value, weight, torch.ones(41, 3, dtype=torch.bool))
        none.fold("w", value, weight)
        plain.fold("w", value, weight)
    expected = plain.means({"w": values[0]})["w"]
    assert torch.equal(none.mean("w"), expected)
    assert torch.equal(ones.mean("w"), expected)
    assert bool(none.moved("w").all())


@pytest.mark.parametrize("count", range(1, 12))
def test_the_mean_of_equal_values_is_the_value_bit_for_bit(count):
    """A sum divided by its count is not: 3 x is rounded before it is divided."""
    value, mean, union = random(1000), RunningSums(), torch.zeros(1000, dtype=torch.bool)
    for i in range(count):
        mask = RandomStream(bytes([i]) * 32).bernoulli(0.5, (1000,))
        mean.fold("w", value, 1.0, mask)
        union |= mask
    assert torch.equal(mean.mean("w"), value * union)
    assert torch.equal(mean.moved("w"), union)


def test_against_a_naive_twin_in_double_precision():
    values = [random(6, 4, seed=i) for i in range(5)]
    drawn = [RandomStream(bytes([i]) * 32).bernoulli(0.4, (6, 4)) for i in range(5)]
    weights = [2.0, 7.0, 1.0, 30.0, 4.0]
    mean = RunningSums()
    for value, mask, weight in zip(values, drawn, weights, strict=True):
        mean.fold("w", value, weight, mask)
    for i in range(6):
        for j in range(4):
            there = [n for n in range(5) if drawn[n][i, j]]
            total = sum(weights[n] for n in there)
            expected = sum(weights[n] * values[n][i, j].item() for n in there) / total if there else 0.0
            assert mean.mean("w")[i, j].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert bool(mean.moved("w")[i, j]) == bool(there)


def test_inputs_stay_and_bad_weights_are_refused():
    value, mask, mean = torch.ones(3), torch.tensor([True, False, True]), RunningSums()
    mean.fold("w", value, 1.0, mask)
    mean.fold("w", 3 * value, 1.0, mask)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert mask.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="weight: expected a number above 0"):
        mean.fold("w", value, 0.0, mask)


@pytest.mark.parametrize("weight", [1.0, 3.0, 49.0, 97.0, 1e6 + 1])
def test_one_masked_value_is_its_own_mean_bit_for_bit(weight):
    """49 times the reciprocal of 49 is not 1 in fp32."""
    mean, value = RunningSums(), torch.linspace(-3.3, 2.7, 11)
    mean.fold("w", value, weight, torch.arange(11) % 3 > 0)
    assert torch.equal(mean.mean("w"), torch.where(torch.arange(11) % 3 > 0, value, 0.0))


def test_a_name_has_a_mask_from_every_client_or_from_none():
    sums = RunningSums()
    sums.fold("w", torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="w: some clients sent a mask and others none"):
        sums.fold("w", torch.ones(2), 1.0, torch.tensor([True, False]))
    sums.fold("v", torch.ones(2), 1.0, torch.tensor([True, False]))
    with pytest.raises(ValueError, match="v: some clients sent a mask and others none"):
        sums.fold("v", torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="v: its masks give every entry its own weight"):
        sums.weight("v")


def test_what_clients_give_in_clear_stays_by_client():
    sums = RunningSums()
    sums.add("a", 3, ClientContributions([Contribution("w", torch.ones(2), 3.0)], {"said": "A"}))
    sums.add("b", 5, ClientContributions([]))
    assert (sums.examples, sums.clear) == (8, {"a": {"said": "A"}, "b": {}})
    assert sums.weight("w") == 3.0


@pytest.mark.parametrize("axis", [0, 1])
def test_masks_of_whole_columns_sum_as_masks_of_entries_and_weigh_a_column_each(axis):
    columns, whole = RunningSums(), RunningSums()
    for seed in range(3):
        value, row = random(300, 70, seed=seed), random(300 if axis == 0 else 70, seed=9 + seed) > 0
        mask = (row[:, None] if axis == 0 else row[None]).expand(300, 70)
        columns.fold("w", value, 2.0 + seed, mask)
        whole.fold("w", value, 2.0 + seed, mask.contiguous())
    assert columns._weight["w"].numel() == (300 if axis == 0 else 70)
    assert torch.equal(columns.moved("w"), whole.moved("w"))
    assert torch.equal(columns.mean("w"), whole.mean("w"))
    other = random(300, 70, seed=5) > 0
    for sums in (columns, whole):  # a client without whole columns
        sums.fold("w", random(300, 70, seed=6), 1.0, other)
    assert torch.equal(columns.mean("w"), whole.mean("w"))
    assert columns.take("w") is not None
    assert "w" not in columns
