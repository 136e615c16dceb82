from __future__ import annotations

import math

import pytest
import torch

from fedveil.errors import ConfigError, WireError
from fedveil.ops import random_masks
from fedveil.rng import RandomStream
from tests.pretend import DEVICE, Pretended

KEY = bytes(range(32))


def random(*shape, seed=1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pack_and_unpack_by_hand():
    value, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [True, True]])
    packed = random_masks.pack_masked(value, mask)
    assert packed.tolist() == [1.0, 3.0, 4.0]
    assert random_masks.unpack_masked("w", packed, mask).tolist() == [[1.0, 0.0], [3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_undoes_pack_on_any_layout_of_memory(dtype):
    value = random(7, 5).to(dtype).T  # not contiguous
    mask = RandomStream(KEY).bernoulli(0.4, (5, 7))
    back = random_masks.unpack_masked("w", random_masks.pack_masked(value, mask), mask)
    assert back.dtype == dtype
    assert torch.equal(back, value * mask)


def test_what_is_masked_never_gets_in_not_even_nan():
    value, mask = torch.tensor([math.nan, 1.0]), torch.tensor([False, True])
    assert random_masks.unpack_masked("w", random_masks.pack_masked(value, mask), mask).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_values_is_refused(count):
    mask = torch.tensor([[True, False], [True, True]])
    with pytest.raises(WireError, match=rf"h.w: expected 3 values, as many as its mask has ones, found {count}"):
        random_masks.unpack_masked("h.w", torch.ones(count), mask)


def test_on_another_device_as_on_the_cpu():
    value, mask = random(70, 41).T, random_masks.expand_mask(KEY, 0.3, (41, 70))
    packed = random_masks.pack_masked(value, mask)
    with Pretended() as pretended:
        for ours in (mask, mask.to(DEVICE)):
            there = random_masks.pack_masked(value.to(DEVICE), ours)
            back = random_masks.unpack_masked("w", there, ours)
            assert torch.equal(there.values, packed)
            assert torch.equal(back.values, value * mask)
        for count in (0, len(packed) - 1, len(packed) + 1):
            with pytest.raises(WireError, match=f"h.w: expected {len(packed)} values, .* found {count}"):
                random_masks.unpack_masked("h.w", torch.ones(count).to(DEVICE), mask)
        assert not pretended.back


def test_rate_by_tensor_first_match_wins_and_no_match_is_zero():
    rate = {"attn": 0.25, "attn|mlp": 0.5}
    assert random_masks.keep_probability(rate, ["h.attn.w", "h.mlp.w", "wte"]) == {
        "h.attn.w": 0.75,
        "h.mlp.w": 0.5,
        "wte": 1.0,
    }
    assert random_masks.keep_probability(0.25, ["a", "b"]) == {"a": 0.75, "b": 0.75}


@pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan, math.inf])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ConfigError, match="^rate: expected the probability of a zero, from 0 to 1, found"):
        random_masks.check_rate("rate", rate)
    with pytest.raises(ConfigError, match="^rate.mlp: expected"):
        random_masks.check_rate("rate", {"attn": 0.5, "mlp": rate})


def test_a_bad_expression_is_refused():
    with pytest.raises(ConfigError, match=r"^rate.\(: expected a regular expression"):
        random_masks.check_rate("rate", {"(": 0.5})


def test_tensors_of_one_key_are_numbered_in_the_order_of_their_names():
    """So that no two tensors have the same bits, and a server that has the key alone gets them all."""
    keep, shapes = {"b": 0.3, "a": 0.3, "c": 0.9, "whole": 1.0, "none": 0.0}, {"a": (3, 4), "b": (5,), "c": (2, 2)}
    keys = random_masks.draw_mask_keys(RandomStream(KEY), keep)
    assert sorted(keys) == [0.3, 0.9]
    masks = dict(random_masks.expand_masks(keys, keep, shapes))
    assert list(masks) == ["a", "b", "c"]
    for name, number in (("a", 0), ("b", 1), ("c", 0)):
        assert torch.equal(masks[name], random_masks.expand_mask(keys[keep[name]], keep[name], shapes[name], number))
    assert not torch.equal(random_masks.expand_mask(KEY, 0.5, (99,), 0), random_masks.expand_mask(KEY, 0.5, (99,), 1))
