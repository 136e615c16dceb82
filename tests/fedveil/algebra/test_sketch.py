"""A sketch tells how far two sets of tensors are apart, also where somebody tries to hide it."""

from __future__ import annotations

import pytest
import torch

from fedveil.algebra.sketch import SIZE, sketch

KEY = bytes(range(32))


def distance(x: dict, y: dict, key: bytes = KEY) -> float:
    return float((sketch(x, key) - sketch(y, key)).norm())


@pytest.mark.parametrize("shape", [(3,), (50, 40), (300, 700)])
def test_the_distance_is_within_a_tenth(shape):
    generator = torch.Generator().manual_seed(1)
    x = {"a": torch.randn(shape, generator=generator), "b": torch.randn(7, generator=generator)}
    y = {"a": x["a"] + 0.01 * torch.randn(shape, generator=generator), "b": x["b"]}
    assert distance(x, y) == pytest.approx(float((x["a"] - y["a"]).norm()), rel=0.1)
    assert distance(x, x) == 0.0
    assert len(sketch(x, KEY)) == SIZE


@pytest.mark.parametrize("stride", [1024, 1 << 16])
def test_a_change_on_entries_of_one_stride_is_not_missed(stride):
    """Buckets that follow from an entry's place could be filled with values that cancel."""
    x = torch.zeros(20 * (1 << 16))
    y = x.clone()
    y[::stride] = 1.0
    assert distance({"a": x}, {"a": y}) == pytest.approx(float(y.norm()), rel=0.5)


def test_one_entry_is_exact_and_each_key_has_its_own_sketch():
    x, y = {"a": torch.zeros(500)}, {"a": torch.zeros(500).index_fill(0, torch.tensor(17), 2.5)}
    assert distance(x, y) == 2.5
    full = {"a": torch.randn(500, generator=torch.Generator().manual_seed(2))}
    assert not torch.equal(sketch(full, KEY), sketch(full, bytes(32)))
    assert not torch.isfinite(sketch({"a": torch.tensor([float("nan")])}, KEY)).all()
