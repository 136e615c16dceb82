"""Figures of docs/results.md are drawn from committed results, and none is older than its result."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from PIL import Image

from fedveil_bench import figures, folders
from tests.conftest import ROOT

DRAWN = figures.FIGURES | figures.FRONTS


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_figure_shows_what_its_result_has(name):
    """Else run python -m fedveil_bench.figures."""
    with Image.open(ROOT / "docs" / "pictures" / f"results-{name}.png") as picture:
        assert picture.info["Description"] == figures.compute_digest(DRAWN[name])


@pytest.mark.parametrize("name", figures.CURVES)
def test_a_curve_is_drawn_if_and_only_if_its_result_has_one(name):
    """Else run python -m fedveil_bench.figures."""
    file = ROOT / "docs" / "pictures" / f"results-{name}.png"
    assert file.is_file() == bool(figures.read_curves(figures.CURVES[name]))
    if file.is_file():
        with Image.open(file) as picture:
            assert picture.info["Description"] == figures.compute_digest(figures.CURVES[name])


def test_curves_of_a_result_are_drawn_by_round_and_by_bytes(tmp_path, monkeypatch):
    """A row without a curve, or with one of another metric, is left out; so is a result that is not there."""
    (tmp_path / "docs/pictures").mkdir(parents=True)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    monkeypatch.setattr(folders, "results_folder", lambda: tmp_path / "benchmarks" / "results")
    curve = [
        {"round": 2 * i, "upload_bytes": 10**6 * i, "download_bytes": 2 * 10**6 * i,
         "metrics": {"loss": {"mean": 3.0 - i, "low": 2.5 - i, "high": 3.5 - i, "n": 5}}}
        for i in range(3)
    ]  # fmt: skip
    other = [at | {"metrics": {"bleu": at["metrics"]["loss"]}} for at in curve]
    rows = [{"name": "FedAvg server", "curve": curve}, {"name": "round 0"}, {"name": "FedPer", "curve": other}]
    (tmp_path / "benchmarks/results/a_b.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(figures, "FIGURES", {})
    monkeypatch.setattr(figures, "FRONTS", {})
    monkeypatch.setattr(figures, "COPIED", {})
    there = figures.ResultCurves("a/b", "loss", "nats")
    monkeypatch.setattr(figures, "CURVES", {"there": there, "not-yet": figures.ResultCurves("c/d", "loss", "nats")})
    assert {name: [at[:2] for at in of] for name, of in figures.read_curves(there).items()} == {
        "FedAvg": [(0, 0.0), (2, 3.0), (4, 6.0)]
    }
    figures.main()
    assert [file.name for file in (tmp_path / "docs/pictures").iterdir()] == ["results-there.png"]
    with Image.open(tmp_path / "docs/pictures/results-there.png") as picture:
        assert picture.info["Description"] == figures.compute_digest(there)
        assert len(picture.convert("RGB").getcolors(2**16)) > 20
    by_round, by_bytes = figures.by_round_and_bytes(there).axes
    assert by_round.lines[0].get_xydata().tolist() == [[0, 3], [2, 2], [4, 1]]
    assert by_bytes.lines[0].get_xydata().tolist() == [[0, 3], [3, 2], [6, 1]]


@pytest.mark.parametrize("name", figures.COPIED)
def test_a_copied_figure_is_the_preset_s(name):
    copied = ROOT / "docs" / "pictures" / f"results-{name}.png"
    assert copied.read_bytes() == (ROOT / "benchmarks" / "results" / figures.COPIED[name]).read_bytes()


def test_a_figure_is_drawn_from_the_result_and_a_row_that_is_not_there_is_an_error(tmp_path):
    figure = figures.FIGURES["fedqsn"]
    rows = json.loads((ROOT / "benchmarks/results/fedqsn_table2.json").read_text())["rows"]
    (proxy,) = (row["metrics"]["loss"] for row in rows if row["name"] == "w = 2 proxy")
    assert figures.read_intervals(figure)["proxy as received"][1]["mean"] == proxy["mean"]
    figures.draw_figure(figure, tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as picture:
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(2**16)) > 20
    with pytest.raises(KeyError):
        figures.read_intervals(replace(figure, series={"base": (("no such row", "loss"),)}))


@pytest.mark.parametrize(
    ("metric", "bounds"),
    [
        ("Caltech alignment", (0, 1)), ("CIFAR alignment, wrong site", (0, 1)), ("caption 10%", (0, 1)),
        ("LiRA", (0, 1)), ("AUROC, loss", (0, 1)), ("rows", (0, 1)), ("local", (0, 100)), ("right", (0, 100)),
        ("qa accuracy", (0, 100)), ("loss", (-math.inf, math.inf)), ("psnr", (-math.inf, math.inf)),
    ],
)  # fmt: skip
def test_what_a_metric_can_be(metric, bounds):
    assert figures.find_metric_bounds(metric) == bounds


def test_no_interval_is_drawn_beyond_what_is_possible():
    row = figures.read_intervals(figures.FRONTS["lora"])["FedAvg"][1]
    assert row["high"] == 1.0
    assert 0.9 < row["low"] < row["mean"] < 1.0


def test_a_server_without_a_model_is_not_drawn_as_one():
    """FedSA-LoRA's server is the base: the line of the base says so, and no interval is drawn."""
    front = figures.FRONTS["lora"]
    at_base = [name for name, (x, _) in figures.read_intervals(front).items() if x["mean"] == figures.base_of(front)]
    assert at_base == ["FedSA-LoRA"]
    drawn = figures.draw_front(front)
    shown = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert "FedSA-LoRA: no model\nat the server" in shown
    assert "FedAvg" in shown
