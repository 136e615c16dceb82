"""CPU use of a waiting site, compared with values by hand."""

from __future__ import annotations

import pytest

from fedveil_bench.core import idle
from fedveil_bench.core.idle import IdleWindow

STOCK = [
    IdleWindow(10.0, {"SuperNode": 0.0625, "SuperExec": 0.1875}),
    IdleWindow(20.0, {"SuperNode": 0.25, "SuperExec": 0.25}),
]


def test_a_share_is_of_the_window_s_own_seconds():
    assert IdleWindow(200.0, {"SuperNode": 0.5, "SuperExec": 0.25}).percent() == 0.375
    assert IdleWindow(200.0, {"SuperNode": 0.5, "SuperExec": 0.25}).percent("SuperNode") == 0.25
    assert IdleWindow(200.0, {"SuperNode": 0.5}).percent("worker") == 0.0


def test_a_table_has_both_ways_by_program_and_the_bound_is_for_ours():
    ours = [
        IdleWindow(10.0, {"SuperNode": 0.015625, "worker": 0.0078125}),
        IdleWindow(20.0, {"SuperNode": 0.03125, "resident": 0.015625}),
    ]
    found = idle.build_outcome({"fedveil": ours, "flower": STOCK}, 0.5)
    assert [(row["name"], row["seconds"]) for row in found.rows] == [("fedveil", 30.0), ("flower", 30.0)]
    metrics = found.rows[0]["metrics"]
    assert list(metrics) == ["percent_of_a_core", "% SuperNode", "% resident", "% worker"]
    assert metrics["percent_of_a_core"]["mean"] == 0.234375
    assert (metrics["% SuperNode"]["mean"], metrics["% worker"]["mean"]) == (0.15625, 0.0390625)
    assert found.verdicts == [
        "A waiting site takes 0.23 % of a core (0.23 to 0.23; asked: at most 0.5 %: holds here), stock Flower's 2.50 %."
    ]


@pytest.mark.parametrize(
    "cpu, word", [((0.25, 0.26), "holds here"), ((0.9, 0.91), "does not hold here"), ((0.2, 0.8), "not decided")]
)
def test_the_word_goes_by_the_interval_over_the_windows(cpu, word):
    (said,) = idle.build_outcome(
        {"fedveil": [IdleWindow(100.0, {"SuperNode": s}) for s in cpu], "flower": STOCK}, asked=0.5
    ).verdicts
    assert f"asked: at most 0.5 %: {word})" in said
