"""A sketch tells how far two sets of tensors are apart, also where somebody tries to hide it."""

from __future__ import annotations

import pytest
import torch

from fedveil.ops.count_sketch import SIZE, count_sketch

KEY = bytes(range(32))


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((count_sketch(x, KEY, "a") - count_sketch(y, KEY, "a")).norm())


@pytest.mark.parametrize("shape", [(3,), (50, 40), (300, 700)])
def test_the_distance_is_about_right(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    y = x + 0.01 * torch.randn(shape, generator=generator)
    assert distance(x, y) == pytest.approx(float((x - y).norm()), rel=0.3)
    assert distance(x, x) == 0.0
    assert len(count_sketch(x, KEY, "a")) == SIZE


@pytest.mark.parametrize("stride", [64, 1024, 1 << 16])
def test_a_change_on_entries_of_one_stride_is_not_missed(stride):
    """Buckets that follow from an entry's place could be filled with values that cancel."""
    x = torch.zeros(20 * (1 << 16))
    y = x.clone()
    y[::stride] = 1.0
    assert distance(x, y) == pytest.approx(float(y.norm()), rel=0.5)


def test_one_entry_is_exact_and_each_key_and_name_has_a_sketch_of_its_own():
    x = torch.zeros(500)
    assert distance(x, x.index_fill(0, torch.tensor(17), 2.5)) == 2.5
    full = torch.randn(500, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(count_sketch(full, KEY, "a"), count_sketch(full, bytes(32), "a"))
    assert not torch.equal(count_sketch(full, KEY, "a"), count_sketch(full, KEY, "b"))
    assert not torch.isfinite(count_sketch(torch.tensor([float("nan")]), KEY, "a")).all()
