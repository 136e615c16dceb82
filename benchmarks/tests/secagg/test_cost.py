"""The figures of one attempt: all are present, and the sum was really opened."""

from __future__ import annotations

import pytest

from fedveil_bench.secagg import cost


@pytest.mark.parametrize(("sites", "silent"), [(3, 0), (4, 1)])
def test_an_attempt_is_measured_with_and_without_silent_sites(sites, silent):
    found = cost.measure_attempt(sites, 1000, silent)
    assert found["upload_bytes"] - found["upload_bytes_beyond_the_vector"] == 4 * 1000
    assert (found["agree_bytes_a_site"] > found["plan_bytes"]) == (silent > 0)
    assert found["open_bytes_a_site"] > found["plan_bytes"] > 300 * sites
    assert all(value >= 0 for name, value in found.items() if name != "server_memory_mb")


def test_rounds_are_compared_with_the_clear_one_and_a_silent_site_with_none():
    assert cost.describe_rounds(3, 2.5, 7.75).endswith(
        "5.2 s more than the clear one's 2.5 s (asked: at most 6 s at 8 sites)."
    )
    assert cost.describe_rounds(8, 9.0, 14.0, 16.5).endswith(
        "with one site that sends no upload, 2.5 s more than that (asked: at most 3 s)."
    )
