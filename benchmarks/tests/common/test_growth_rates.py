"""Exponents and slopes, compared with values by hand and with known lines."""

from __future__ import annotations

import pytest

from fedveil_bench.common.growth_rates import fit_exponent, fit_slope, slope_by_round, thin_curve


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_an_exact_power_is_found_with_no_width(power):
    sizes = [10, 100, 1000, 1000]
    found = fit_exponent(sizes, [3.0 * n**power for n in sizes])
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((power, power, power), abs=1e-6)
    assert found["n"] == 4


def test_a_slope_and_its_interval_by_hand():
    """y = 0, 2, 1 at x = 0, 1, 2: slope 1/2; residuals -1/2, 1, -1/2; s^2 = 1.5; half = 12.706 sqrt(1.5 / 2)."""
    found = fit_slope([0, 1, 2], [0, 2, 1])
    assert found["mean"] == pytest.approx(0.5)
    assert found["high"] - found["mean"] == pytest.approx(12.706 * 0.75**0.5, rel=1e-4)


def test_two_points_have_no_interval_and_say_so():
    assert fit_slope([1, 2], [5, 7]) == {"mean": 2.0, "low": 2.0, "high": 2.0, "n": 2}
    with pytest.raises(ValueError, match="two places or more, found 3"):
        fit_slope([4, 4, 4], [1, 2, 3])


def test_a_step_that_stays_has_a_wide_interval_and_a_leak_a_narrow_one():
    """Single rounds would give the step an interval without 0."""
    step, leak = [0.0] * 95 + [1.0] * 5, [0.1 * i for i in range(100)]
    assert slope_by_round(step)["low"] < 0
    assert fit_slope(list(range(100)), step)["low"] > 0
    assert slope_by_round(leak)["low"] == pytest.approx(0.1)
    assert slope_by_round(leak)["n"] == 10
    assert slope_by_round([0.0, 1.0, 2.0])["mean"] == pytest.approx(1.0)


def test_a_curve_keeps_its_ends_apart():
    assert thin_curve([float(i) for i in range(250)], 100) == [float(i) for i in range(0, 250, 3)]
    assert thin_curve([1.0, 2.0]) == [1.0, 2.0]
