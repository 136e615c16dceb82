"""FedRand on pictures: rows on their way between processes, and a whole small table."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand import on_pictures
from fedveil.benchmarks.run import Options


def around(value: float, width: float = 0.01) -> Figure:
    rng = np.random.default_rng(int(value * 1000))
    return Figure(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


def test_rows_survive_the_way_between_processes():
    rows = {"a": on_pictures._Row({"loss": around(0.4)}, 3, 4, 5.0)}
    back = on_pictures._from_json(on_pictures._to_json(rows))
    assert back["a"].figures["loss"].value == 0.4
    assert (back["a"].figures["loss"].replicates == rows["a"].figures["loss"].replicates).all()
    assert (back["a"].upload_bytes, back["a"].download_bytes, back["a"].seconds) == (3, 4, 5.0)


@pytest.mark.slow
def test_a_small_table_from_end_to_end():
    """Both controls, every kind of row, and FedAvg rebuilt exactly."""
    settings = {
        "clients": 3, "clients_scored": 1, "seeds": 1, "overfitted_members": 24, "controls": ["loss"], "errors": [],
        "methods": {"FedAvg": {"name": "fedavg"}, "FedRand": {"name": "fedrand"}},
        "attack": {"shadows": 2, "shadow_steps": 2, "aligned_rows": 20, "generated_rows": 5, "shifted": ["loss"],
                   "rows": 50},
        "parts": [{"name": "", "data": "caltech-caption", "test": "caltech-caption", "shifted": "cifar-caption",
                   "metrics": ["test loss", "cider", "rouge_l", "bleu_4"], "members": 60, "held_out": 80,
                   "test_rows": 10}],
        "config": {"task.model": "tiny", "task.partition": "iid", "train.batch-size": 8, "train.learning-rate": 3e-3,
                   "train.epochs": 2, "cohort.fraction": 0.6, "evaluate.max-new-tokens": 8, "run.rounds": 2},
    }  # fmt: skip
    answer = on_pictures._from_json(on_pictures.of_seed(settings, 0, Options()))
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
