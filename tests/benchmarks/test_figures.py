"""Figures of docs/results.md: drawn from committed results, and none is older than its result."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PIL import Image

from fedveil.benchmarks import figures
from tests.conftest import ROOT

DRAWN = figures.FIGURES | figures.FRONTS


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_figure_shows_what_its_result_has(name):
    """Else run python -m fedveil.benchmarks.figures."""
    with Image.open(ROOT / "docs" / "pictures" / f"results-{name}.png") as picture:
        assert picture.info["Description"] == figures.digest(DRAWN[name])


@pytest.mark.parametrize("name", figures.COPIED)
def test_a_copied_figure_is_the_preset_s(name):
    copied = ROOT / "docs" / "pictures" / f"results-{name}.png"
    assert copied.read_bytes() == (ROOT / "benchmarks" / "results" / figures.COPIED[name]).read_bytes()


def test_a_figure_is_drawn_from_the_result_and_a_row_that_is_not_there_is_an_error(tmp_path):
    figure = figures.FIGURES["fedqsn"]
    assert figures.found(figure)["proxy as received"][1]["mean"] == pytest.approx(2.068, abs=5e-4)
    figures.draw(figure, tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as picture:
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(2**16)) > 20
    with pytest.raises(KeyError):
        figures.found(replace(figure, series={"base": (("no such row", "loss"),)}))
