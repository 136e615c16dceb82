"""The figure of the accuracy table."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from fedveil_bench.random_binary import figures

LAWS = {"random": [0.5, 0.25, 0.25], "locked": [0.5, 0.0, 0.5]}


def shown(base, method, last, counts):
    points = [{"mean": mean, "low": mean - 1, "high": mean + 1} for mean in (10.0, 20.0, last)]
    return {"base": base, "method": method, "curve": points, "counts": counts}


@pytest.mark.long
def test_a_panel_a_base_and_one_of_counts_which_all_show_what_they_are_given():
    """Shares of zero, which a logarithm does not have, are left out."""
    random, fixed = shown("scratch", "random", 30.0, LAWS["random"]), shown("scratch", "fixed", 25.0, [0.0, 0.0, 1.0])
    tables = [
        [random, fixed],
        [random, fixed, shown("position", "random", 90.0, LAWS["random"])],
        [random, shown("scratch", "fixed", 26.0, [0.0, 0.0, 1.0])],
        [shown("scratch", "random", 30.0, LAWS["locked"]), fixed],
        [random, shown("scratch", "fixed", 25.0, [1.0, 0.0, 0.0])],
    ]
    drawn = [figures.draw_figure(table, LAWS) for table in tables]
    sizes = [Image.open(io.BytesIO(each)).size for each in drawn]
    assert sizes[0][0] / 2 == sizes[1][0] / 3
    assert len(set(drawn[:4])) == 4
    assert drawn[4] == drawn[0]  # a method without a law has no counts in the figure


@pytest.mark.long
def test_counts_are_those_of_the_base_with_the_most_methods_that_have_a_law():
    """Also where a base with fewer stands before it: there R = 0.2, 0.8 and locked masks lay undrawn."""
    first = shown("position", "random", 90.0, LAWS["random"])
    random, locked = (shown("scratch", name, 30.0, counts) for name, counts in LAWS.items())
    whole = figures.draw_figure([first, random, locked], LAWS)
    assert figures.draw_figure([first | {"counts": [1.0, 0.0, 0.0]}, random, locked], LAWS) == whole
    assert figures.draw_figure([first, random, locked | {"counts": [0.4, 0.0, 0.6]}], LAWS) != whole
    fixed = shown("scratch", "fixed", 25.0, [0.0, 0.0, 1.0])  # has no law
    assert figures.draw_figure([first | {"counts": [1.0, 0.0, 0.0]}, fixed], LAWS) != figures.draw_figure(
        [first, fixed], LAWS
    )
