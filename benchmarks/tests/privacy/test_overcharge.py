"""Earlier figures: those that the accountant charged at the time."""

from __future__ import annotations

import pytest

from fedveil_bench import runner
from fedveil_bench.privacy import overcharge
from fedveil_bench.runner import BenchOptions

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("n", "b", "z", "steps", "replace_one", "zero_out"),
    [(100, 10, 1.5, 50, 6.6013, 2.8720), (57, 8, 2.0, 30, 4.6715, 2.0868), (60, 30, 8.0, 100, 6.2956, 2.8236)],
)
def test_noise_in_a_sum_was_charged_by_renyi_divergences(n, b, z, steps, replace_one, zero_out):
    assert overcharge.replaced_in_sum_before(b / n, z, steps, 1e-5) == pytest.approx(replace_one, abs=1e-3)
    assert overcharge.zeroed_in_sum_before(b / n, z, steps, 1e-5) == pytest.approx(zero_out, abs=1e-3)


def test_fixed_batches_and_own_shares_before():
    assert overcharge.fixed_before(100, 10, 1.5, 50, 1e-5) == pytest.approx(15.7186, abs=1e-3)
    assert overcharge.own_share_before(2.8434, 2, 1e-5) == pytest.approx(4.23, abs=0.01)
    assert overcharge.own_share_before(2.8434, 5, 1e-5) == pytest.approx(7.24, abs=0.01)


def test_the_quick_form():
    settings = runner.read_preset("privacy/overcharge", "quick")["settings"]
    rows = {
        row["name"].split(":")[0]: row["metrics"] for row in overcharge.run_benchmark(settings, BenchOptions()).rows
    }
    assert rows["site, replace-one"]["before / now"]["mean"] == 1
    assert rows["site, replace-one"]["now"]["mean"] == pytest.approx(4.1602, rel=1e-3)
    assert rows["sum, replace-one"]["now"]["mean"] == pytest.approx(4.2406, rel=2e-3)
    assert rows["fixed, replace-one"]["now"]["mean"] == pytest.approx(9.8954, rel=1e-3)
    assert rows["own share of 2 sites"]["now"]["mean"] == pytest.approx(5.62, rel=2e-3)
    assert rows["own share of 2 sites"]["before / now"]["mean"] < 1 < rows["sum, zero-out"]["before / now"]["mean"]
