"""Values as integers: by hand, at the extremes, and by properties."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.federation.secagg.fixed_point import FixedPointRing

FINITE = st.floats(-3.0, 3.0, width=32)


def encoded(ring: FixedPointRing, values, weight: int = 1, mask=None) -> np.ndarray:
    into = np.zeros(len(values), ring.dtype)
    ring.encode(torch.as_tensor(values, dtype=torch.float32), weight, mask, into)
    return into


def test_scale_step_and_integers_by_hand():
    """K = 3, M = 5, C = 2: (2^31 - 1 - 3) // 15 = 143165576, so S = 71582788."""
    ring = FixedPointRing(32, 3, 5, 2.0)
    assert ring.scale == 71582788.0
    assert ring.step == 1 / (2 * 71582788.0 * 5)
    assert encoded(ring, [0.0, 1.0, -1.0, 2.0], 5).tolist() == [0, 357913940, 2**32 - 357913940, 715827880]
    assert encoded(ring, [1.0, -0.5]).tolist() == [71582788, 2**32 - 35791394]


def test_rounds_to_the_nearest_and_halves_to_even():
    """S = 1 with K = 1 and C = 2^31 - 2 units."""
    ring = FixedPointRing(32, 1, 1, float(2**31 - 2))
    assert ring.scale == 1.0
    assert encoded(ring, [0.4, 0.5, 0.6, 1.5, 2.5, -0.5, -0.6]).astype("<i4").tolist() == [0, 0, 1, 2, 2, 0, -1]


def test_what_is_beyond_the_bound_is_clipped_and_counted_if_its_mask_keeps_it():
    ring, into = FixedPointRing(32, 2, 1, 1.5), np.zeros(5, "<u4")
    value = torch.tensor([1.5, 1.5001, -7.0, 9.0, 0.0])
    assert ring.encode(value, 1, torch.tensor([True, True, True, False, True]), into) == 2
    most = round(1.5 * ring.scale)
    assert into.astype("<i4").tolist() == [most, most, -most, 0, 0]
    assert value.tolist() == torch.tensor([1.5, 1.5001, -7.0, 9.0, 0.0]).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_integer_but_where_it_does_not_count(bad):
    ring, into = FixedPointRing(32, 2, 1, 1.0), np.zeros(2, "<u4")
    with pytest.raises(ValueError, match="NaN or infinity"):
        ring.encode(torch.tensor([0.5, bad]), 1, None, into)
    assert ring.encode(torch.tensor([0.5, bad]), 1, torch.tensor([True, False]), into) == 0


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(("summands", "weight"), [(1, 1), (2, 1), (3, 7), (100, 1), (1000, 1000), (10_000, 10_000)])
@pytest.mark.parametrize("bound", [1e-9, 0.1, 64.0, 1e9, math.pi])
def test_a_sum_of_extreme_values_never_wraps(bits, summands, weight, bound):
    if summands * weight >= 1 << (bits - 2):
        return
    ring, half = FixedPointRing(bits, summands, weight, bound), 1 << (bits - 1)
    for value in (bound, -bound, 2 * bound):
        into = np.zeros(1, ring.dtype)
        ring.encode(torch.tensor([value], dtype=torch.float64), weight, None, into)
        one = int(into[0]) - (1 << bits if int(into[0]) >= half else 0)
        assert math.copysign(1, one) == math.copysign(1, value)
        assert abs(one) * summands < half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_of_a_wire_and_more_than_a_block(dtype):
    ring = FixedPointRing(64, 3, 2, 4.0)
    value = torch.linspace(-3.9, 3.9, (1 << 16) + 77).to(dtype)
    into = np.zeros(len(value), ring.dtype)
    assert ring.encode(value, 2, None, into) == 0
    assert float((ring.decode(into) / 2 - value.double()).abs().max()) <= 2 * ring.step + 4.0 * 2**-51


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(FINITE, min_size=1, max_size=6),
    weight=st.integers(1, 5),
    bits=st.sampled_from([32, 64]),
    data=st.data(),
)
def test_a_weighted_sum_comes_back_to_the_rounding(values, weight, bits, data):
    """Of three sites with any masks; against exact fractions."""
    ring = FixedPointRing(bits, 3, 5, 2.0)
    total, exact = np.zeros(len(values), ring.dtype), [Fraction(0)] * len(values)
    for _ in range(3):
        mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
        total += encoded(ring, values, weight, torch.tensor(mask))
        for i, value in enumerate(values):
            exact[i] += Fraction(max(-2.0, min(2.0, value))) * weight if mask[i] else 0
    for decoded_value, wanted in zip(ring.decode(total).tolist(), exact, strict=True):
        assert abs(Fraction(decoded_value) - wanted) <= 3 * Fraction(1 / (2 * ring.scale)) + Fraction(1, 2**48)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=4), summands=st.integers(1, 1000), most=st.integers(1, 1000))
def test_one_value_of_the_largest_weight_moves_by_at_most_a_step(values, summands, most):
    ring = FixedPointRing(32, summands, most, 3.0)
    decoded_mean = ring.decode(encoded(ring, values, most)) / most
    wanted = torch.tensor(values, dtype=torch.float32).double()
    assert float((decoded_mean - wanted).abs().max()) <= ring.step * (1 + 1e-6)


@pytest.mark.parametrize(
    ("bits", "summands", "weight", "bound", "field"),
    [
        (16, 1, 1, 1.0, "bits"),
        (32, 0, 1, 1.0, "above 0"),
        (32, 1, 0, 1.0, "above 0"),
        (32, 1, 1, 0.0, "above 0"),
        (32, 1, 1, math.inf, "above 0"),
        (32, 1, 1, math.nan, "above 0"),
        (32, 1 << 15, 1 << 15, 1.0, "summands times weight"),
        (64, 2, 1, 1e-300, "bound"),
    ],
)
def test_what_is_no_ring_is_refused(bits, summands, weight, bound, field):
    with pytest.raises(ValueError, match=field):
        FixedPointRing(bits, summands, weight, bound)


@pytest.mark.parametrize("weight", [0, 6, -1])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        encoded(FixedPointRing(32, 3, 5, 2.0), [1.0], weight)
