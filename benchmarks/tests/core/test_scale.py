"""Statements of core/scale about its rows: exponents, parts, and the costs given to simulated arrivals."""

from __future__ import annotations

import pytest

from fedveil.attacks.statistics import confidence_interval
from fedveil_bench.core import scale

CASE = {"name": "fedavg", "method": "fedavg"}
SETTINGS = {
    "rounds": 2,
    "megabytes": 10,
    "strategy": {"sites": [10, 100, 1000], "cases": [CASE]},
    "arrivals": {
        "case": "fedavg", "sites": [10, 100, 1000], "seeds": 2, "poll_seconds": 3.0, "train_seconds": [30.0, 90.0],
        "megabytes_a_second": 125.0, "look_seconds": 0.0,
    },
}  # fmt: skip


def rows(seconds: float, memory: float) -> list[dict]:
    """Of exactly N^seconds and N^memory."""
    found = []
    for n in (10, 100, 1000):
        metrics = {
            "grown MB": confidence_interval([2.0 * n**memory]),
            "CPU ms a message sent": confidence_interval([1.0 * n / 1000]),
            "CPU ms a message folded": confidence_interval([20.0 * n / 1000]),
        }
        points = {"seconds": [0.1 * n**seconds]}
        found.append(
            {"name": f"strategy {n}", "group": "strategy, fedavg", "sites": n, "metrics": metrics, "points": points}
        )
    return found


@pytest.mark.parametrize("power,above", [(1.0, False), (2.0, True)])
def test_an_exponent_above_one_is_named(power, above):
    fit = scale._fit("strategy, fedavg", rows(power, 1.0))
    assert fit["metrics"]["a of seconds ~ N^a"]["mean"] == pytest.approx(power)
    assert fit["metrics"]["b of memory ~ N^b"]["mean"] == pytest.approx(1.0)
    assert ("above 1" in scale._verdict(fit)) is above


def test_memory_that_does_not_grow_has_exponent_zero():
    flat = rows(1.0, 0.0)
    flat[0]["metrics"]["grown MB"] = confidence_interval([-3.0])
    flat[1]["metrics"]["grown MB"] = flat[2]["metrics"]["grown MB"] = confidence_interval([0.2])
    assert scale._fit("x", flat)["metrics"]["b of memory ~ N^b"]["mean"] == 0.0


def test_arrivals_take_the_costs_that_the_largest_case_measured():
    found = scale._arrivals(rows(1.0, 0.0), 0.05, SETTINGS)
    assert found[0]["costs"]["send"] == pytest.approx(0.001)
    assert found[0]["costs"]["fold"] == pytest.approx(0.020)
    assert found[0]["costs"]["relay"] == 0.05
    assert [row["sites"] for row in found] == [10, 100, 1000]
    beyond = [row["metrics"]["seconds beyond the training"]["mean"] for row in found]
    assert 0 < beyond[0] < beyond[1] < beyond[2]
    exponents = scale._fit("arrivals", found)["metrics"]
    assert set(exponents) == {"a of seconds beyond the training ~ N^a"}


def test_cases_have_names_of_their_own():
    """The file of pieces finds them by name."""
    names = {scale._name(way, CASE, 10, SETTINGS) for way in ("in-process", "strategy")}
    names |= {scale._name("strategy", CASE, n, SETTINGS | {"rounds": r}) for n in (10, 100) for r in (2, 3)}
    assert len(names) == 5


@pytest.mark.long
def test_the_figure_has_a_line_for_whatever_was_measured():
    measured = [
        row | {"metrics": row["metrics"] | {"CPU seconds a round": confidence_interval([1.0])}}
        for row in rows(1.0, 1.0)
    ]
    found = measured + scale._arrivals(measured, 0.05, SETTINGS)
    assert scale._figure(scale._groups(found))[:4] == b"\x89PNG"
