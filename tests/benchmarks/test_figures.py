"""Figures of docs/results.md: drawn from committed results, and none is older than its result."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize(
    ("metric", "bounds"),
    [
        ("Caltech alignment", (0, 1)), ("CIFAR alignment, wrong site", (0, 1)), ("caption 10%", (0, 1)),
        ("LiRA", (0, 1)), ("AUROC, loss", (0, 1)), ("rows", (0, 1)), ("local", (0, 100)), ("right", (0, 100)),
        ("qa accuracy", (0, 100)), ("loss", (-math.inf, math.inf)), ("psnr", (-math.inf, math.inf)),
    ],
)  # fmt: skip
def test_what_a_metric_can_be(metric, bounds):
    assert figures.possible(metric) == bounds


def test_no_interval_is_drawn_beyond_what_is_possible():
    row = figures.found(figures.FRONTS["lora"])["FedAvg"][1]
    assert row["high"] == 1.0
    assert 0.9 < row["low"] < row["mean"] < 1.0


def test_a_server_without_a_model_is_not_drawn_as_one():
    """FedSA-LoRA's server is the base: the line of the base says so, and no interval is drawn."""
    front = figures.FRONTS["lora"]
    at_base = [name for name, (x, _) in figures.found(front).items() if x["mean"] == figures.base_of(front)]
    assert at_base == ["FedSA-LoRA"]
    drawn = figures.front(front)
    shown = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert "FedSA-LoRA: no model\nat the server" in shown
    assert "FedAvg" in shown
