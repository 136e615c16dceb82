"""FedRand on pictures: rows passed between processes, and a small full table."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedrand import curves, on_pictures
from fedveil_bench.runner import BenchOptions


def around(value: float, width: float = 0.01) -> ResampledMetric:
    rng = np.random.default_rng(int(value * 1000))
    return ResampledMetric(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


def test_rows_survive_the_way_between_processes():
    rows = {
        "a": on_pictures._Row({"loss": around(0.4)}, 3, 4, 5.0, [curves.CurvePoint(2, 6, 7, {"loss": around(0.3)})])
    }
    back = on_pictures._from_json(on_pictures._to_json(rows))
    assert back["a"].figures["loss"].value == 0.4
    assert (back["a"].figures["loss"].replicates == rows["a"].figures["loss"].replicates).all()
    assert (back["a"].upload_bytes, back["a"].download_bytes, back["a"].seconds) == (3, 4, 5.0)
    (point,) = back["a"].curve
    assert (point.round, point.upload_bytes, point.download_bytes) == (2, 6, 7)
    assert point.figures["loss"].value == 0.3


def test_a_result_has_the_curves_of_its_rows_and_what_a_quality_cost(monkeypatch):
    """The rows of one seed, a part "qa": its points have the part's name, and the row "round 0" has no curve."""
    figures = {"test loss": around(1.0)}
    points = [curves.CurvePoint(2 * i, 1000 * i, 2000 * i, {"test loss": around(3.0 - i)}) for i in range(3)]
    of_part = {"round 0": on_pictures._Row(figures), "FedAvg server": on_pictures._Row(figures, 3, 4, 5.0, points)}
    monkeypatch.setattr(on_pictures, "_part", lambda *_: of_part)
    settings = {
        "parts": [{"name": "qa"}], "clients": 3, "methods": {"FedAvg": {}},
        "curve_targets": [{"row": "FedAvg server", "metric": "qa test loss", "margin": 0.5}],
        "config": {"run.rounds": 4, "train.epochs": 1, "train.batch-size": 8, "train.learning-rate": 1e-3},
    }  # fmt: skip
    monkeypatch.setattr(
        on_pictures.seeds,
        "run_seeds",
        lambda *_: [on_pictures.of_seed(settings, seed, BenchOptions()) for seed in range(3)],
    )
    found = on_pictures.run_benchmark(settings, BenchOptions())
    before, after = found.rows
    assert "curve" not in before
    assert [(p["round"], p["upload_bytes"], p["download_bytes"]) for p in after["curve"]] == [
        (0, 0, 0), (2, 1000, 2000), (4, 2000, 4000),
    ]  # fmt: skip
    assert [p["metrics"]["qa test loss"]["mean"] for p in after["curve"]] == [3.0, 2.0, 1.0]
    assert any(said.startswith("Bytes to a qa test loss of 1.500: FedAvg server: 0.0015 ") for said in found.verdicts)


@pytest.mark.slow
def test_a_small_table_from_end_to_end():
    """Both controls, every kind of row, and FedAvg rebuilt exactly."""
    settings = {
        "clients": 3, "clients_scored": 1, "seeds": 1, "curve_every": 2, "overfitted_members": 24,
        "controls": ["loss"], "errors": [],
        "methods": {"FedAvg": {"name": "fedavg"}, "FedRand": {"name": "fedrand"}},
        "attack": {"shadows": 2, "shadow_steps": 2, "aligned_rows": 20, "generated_rows": 5, "shifted": ["loss"],
                   "rows": 50},
        "parts": [{"name": "", "data": "caltech-caption", "test": "caltech-caption", "shifted": "cifar-caption",
                   "metrics": ["test loss", "cider", "rouge_l", "bleu_4"], "members": 60, "held_out": 80,
                   "test_rows": 10}],
        "config": {"task.model": "tiny", "task.partition": "iid", "train.batch-size": 8, "train.learning-rate": 3e-3,
                   "train.epochs": 2, "cohort.fraction": 0.6, "evaluate.max-new-tokens": 8, "run.rounds": 2},
    }  # fmt: skip
    answer = on_pictures._from_json(on_pictures.of_seed(settings, 0, BenchOptions()))
    assert set(answer) == {
        "round 0", "other rows", "overfitted FedAvg", "FedAvg server", "FedAvg client", "FedRand server",
        "FedRand client", "FedRand client, merged",
    }  # fmt: skip
    assert answer["FedAvg client"].figures["reconstruction error"].value == 0.0
    assert answer["FedRand client"].figures["reconstruction error"].value > 0
    assert answer["overfitted FedAvg"].figures["loss"].value > 0.8
    assert answer["round 0"].figures["calibrated"].value == 0.5
    assert answer["other rows"].figures["calibrated"].count == 30
    assert "LiRA" in answer["other rows"].figures
    assert answer["FedRand server"].upload_bytes < 0.7 * answer["FedAvg server"].upload_bytes
    for method in ("FedAvg", "FedRand"):
        row = answer[f"{method} server"]
        start, end = row.curve
        assert (start.round, end.round, end.upload_bytes) == (0, 2, row.upload_bytes)
        assert start.figures["test loss"].value == answer["round 0"].figures["test loss"].value
        assert end.figures["test loss"].value == row.figures["test loss"].value
