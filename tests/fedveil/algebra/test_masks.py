from __future__ import annotations

import math

import pytest
import torch

from fedveil.algebra import masks
from fedveil.algebra.mean import WeightedMean
from fedveil.errors import ConfigError, WireError
from fedveil.rng import Stream
from fedveil.wire.seeded import expand

KEY = bytes(range(32))


def random(*shape, seed=1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pack_and_unpack_by_hand():
    value, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [True, True]])
    packed = masks.pack(value, mask)
    assert packed.tolist() == [1.0, 3.0, 4.0]
    assert masks.unpack("w", packed, mask).tolist() == [[1.0, 0.0], [3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_undoes_pack_on_any_layout_of_memory(dtype):
    value = random(7, 5).to(dtype).T  # not contiguous
    mask = Stream(KEY).bernoulli(0.4, (5, 7))
    back = masks.unpack("w", masks.pack(value, mask), mask)
    assert back.dtype == dtype
    assert torch.equal(back, value * mask)


def test_what_is_masked_never_gets_in_not_even_nan():
    value, mask = torch.tensor([math.nan, 1.0]), torch.tensor([False, True])
    assert masks.unpack("w", masks.pack(value, mask), mask).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_values_is_refused(count):
    mask = torch.tensor([[True, False], [True, True]])
    with pytest.raises(WireError, match=rf"h.w: expected 3 values, one for every one of its mask, found {count}"):
        masks.unpack("h.w", torch.ones(count), mask)


def test_rate_by_tensor_first_match_wins_and_no_match_is_zero():
    rate = {"attn": 0.25, "attn|mlp": 0.5}
    assert masks.keeps(rate, ["h.attn.w", "h.mlp.w", "wte"]) == {"h.attn.w": 0.75, "h.mlp.w": 0.5, "wte": 1.0}
    assert masks.keeps(0.25, ["a", "b"]) == {"a": 0.75, "b": 0.75}


@pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan, math.inf])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ConfigError, match="^rate: expected a probability of zero from 0 to 1, found"):
        masks.check_rate("rate", rate)
    with pytest.raises(ConfigError, match="^rate.mlp: expected"):
        masks.check_rate("rate", {"attn": 0.5, "mlp": rate})


def test_a_bad_expression_is_refused():
    with pytest.raises(ConfigError, match=r"^rate.\(: expected a regular expression"):
        masks.check_rate("rate", {"(": 0.5})


def test_masks_of_one_keep_are_one_expanded_key_cut_into_pieces():
    """So that no two tensors have the same bits, and a server that has the key alone gets them all."""
    keep, shapes = {"b": 0.3, "a": 0.3, "c": 0.9, "whole": 1.0, "none": 0.0}, {"a": (3, 4), "b": (5,), "c": (2, 2)}
    keys = masks.draw_keys(Stream(KEY), keep)
    assert sorted(keys) == [0.3, 0.9]
    found = dict(masks.expanded(keys, keep, shapes))
    assert list(found) == ["a", "b", "c"]
    assert torch.equal(torch.cat([found["a"].flatten(), found["b"]]), expand(keys[0.3], 0.3, (17,)))
    assert torch.equal(found["c"], expand(keys[0.9], 0.9, (2, 2)))


def test_mean_by_hand():
    """Entry 0: (1 + 4) / 2. Entry 1: 6 alone. Entry 2: nobody. Entry 3: a true zero counts, (8 + 0) / 2."""
    mean = masks.MaskedMean()
    mean.add("w", torch.tensor([1.0, 2.0, 3.0, 8.0]), torch.tensor([True, False, False, True]))
    mean.add("w", torch.tensor([4.0, 6.0, 7.0, 0.0]), torch.tensor([True, True, False, True]))
    assert mean.mean("w").tolist() == [2.5, 6.0, 0.0, 4.0]
    assert mean.moved("w").tolist() == [True, True, False, True]
    assert "w" in mean
    assert "v" not in mean


def test_mean_with_weights_by_hand():
    """Entry 0: (3 * 1 + 1 * 5) / 4. Entry 1: 5 alone, whatever its weight."""
    mean = masks.MaskedMean()
    mean.add("w", torch.tensor([1.0, 9.0]), torch.tensor([True, False]), 3.0)
    mean.add("w", torch.tensor([5.0, 5.0]), torch.tensor([True, True]), 1.0)
    assert mean.mean("w").tolist() == [2.0, 5.0]


@pytest.mark.parametrize("weights", [[1.0] * 7, [3.0, 1e6, 17.0, 1.0, 29.0, 5.0, 2.0]])
def test_all_ones_no_mask_and_the_weighted_mean_agree_bit_for_bit(weights):
    values = [random(41, 3, seed=i) for i in range(7)]
    ones, none, plain = masks.MaskedMean(), masks.MaskedMean(), WeightedMean()
    for value, weight in zip(values, weights, strict=True):
        ones.add("w", value, torch.ones(41, 3, dtype=torch.bool), weight)
        none.add("w", value, None, weight)
        plain.add({"w": value}, weight)
    expected = plain.result({"w": values[0]})["w"]
    assert torch.equal(none.mean("w"), expected)
    assert torch.equal(ones.mean("w"), expected)
    assert bool(none.moved("w").all())


@pytest.mark.parametrize("count", range(1, 12))
def test_the_mean_of_equal_values_is_the_value_bit_for_bit(count):
    """A sum divided by its count is not: 3 x is rounded before it is divided."""
    value, mean, union = random(1000), masks.MaskedMean(), torch.zeros(1000, dtype=torch.bool)
    for i in range(count):
        mask = Stream(bytes([i]) * 32).bernoulli(0.5, (1000,))
        mean.add("w", value, mask)
        union |= mask
    assert torch.equal(mean.mean("w"), value * union)
    assert torch.equal(mean.moved("w"), union)


def test_against_a_naive_twin_in_double_precision():
    values = [random(6, 4, seed=i) for i in range(5)]
    drawn = [Stream(bytes([i]) * 32).bernoulli(0.4, (6, 4)) for i in range(5)]
    weights = [2.0, 7.0, 1.0, 30.0, 4.0]
    mean = masks.MaskedMean()
    for value, mask, weight in zip(values, drawn, weights, strict=True):
        mean.add("w", value, mask, weight)
    for i in range(6):
        for j in range(4):
            there = [n for n in range(5) if drawn[n][i, j]]
            total = sum(weights[n] for n in there)
            expected = sum(weights[n] * values[n][i, j].item() for n in there) / total if there else 0.0
            assert mean.mean("w")[i, j].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert bool(mean.moved("w")[i, j]) == bool(there)


def test_inputs_stay_and_bad_weights_are_refused():
    value, mask, mean = torch.ones(3), torch.tensor([True, False, True]), masks.MaskedMean()
    mean.add("w", value, mask)
    mean.add("w", 3 * value, mask)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert mask.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="weight: expected a number above 0"):
        mean.add("w", value, mask, 0.0)


@pytest.mark.parametrize("weight", [1.0, 3.0, 49.0, 97.0, 1e6 + 1])
def test_one_masked_value_is_its_own_mean_bit_for_bit(weight):
    """49 times the reciprocal of 49 is not 1 in fp32."""
    mean, value = masks.MaskedMean(), torch.linspace(-3.3, 2.7, 11)
    mean.add("w", value, torch.arange(11) % 3 > 0, weight)
    assert torch.equal(mean.mean("w"), torch.where(torch.arange(11) % 3 > 0, value, 0.0))
