"""The runner of the FedRand tables: sentences from figures, the data of a seed, and a whole small table."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.benchmarks.common import pictures, resampling, seeds
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand import adversary, on_pictures
from fedveil.benchmarks.run import Options
from fedveil.errors import ConfigError


def around(value: float, width: float = 0.01) -> Figure:
    rng = np.random.default_rng(int(value * 1000))
    return Figure(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


@pytest.mark.parametrize(
    ("row", "value", "said"),
    [
        ("overfitted FedAvg", 0.9, "expected wholly above 0.5: held."),
        ("overfitted FedAvg", 0.5, "expected wholly above 0.5: NOT HELD."),
        ("round 0", 0.5, "expected 0.5 inside: held."),
        ("round 0", 0.7, "expected 0.5 inside: NOT HELD."),
    ],
)
def test_controls_are_judged_by_their_intervals(row, value, said):
    settings = {"methods": {}, "controls": ["loss"]}
    (sentence,) = on_pictures._verdicts({row: {"loss": around(value), "other": around(0.1)}}, settings)
    assert sentence.startswith(f"Control {row}, loss: {value:.3f} [")
    assert sentence.endswith(said)


def test_a_wrong_site_may_lie_below_but_not_above():
    below, above = (
        on_pictures._verdicts({"M client": {"alignment, wrong site": around(v)}}, {"methods": {}})[0]
        for v in (0.3, 0.7)
    )
    assert below.endswith("held.")
    assert above.endswith("NOT HELD.")


def test_lower_is_better_turns_the_order_round():
    rows = {"a server": {"loss": around(0.2)}, "b server": {"loss": around(0.4)}}
    order = {"metric": "loss", "view": "server", "better": "lower", "rows": ["a", "b"]}
    settings = {"methods": {"a": {}, "b": {}}, "orders": [order]}
    assert on_pictures._verdicts(rows, settings)[0].endswith("holds in all 1 pairs.")
    settings["orders"] = [order | {"better": "higher"}]
    assert "1 are reversed" in on_pictures._verdicts(rows, settings)[0]
    settings["orders"] = [order | {"metric": "not measured"}]
    assert on_pictures._verdicts({k: {} for k in rows}, settings) == []


def test_reconstruction_errors_are_compared():
    rows = {"x client": {"reconstruction error": around(0.2)}, "y client": {"reconstruction error": around(0.5)}}
    small, large = (on_pictures._verdicts(rows, {"methods": {}, "errors": [e]})[0] for e in (["x", "y"], ["y", "x"]))
    assert "x is smaller than y (difference 0.3)" in small
    assert "y is not smaller than x" in large


def test_rows_survive_the_way_between_processes():
    rows = {"a": on_pictures._Row({"loss": around(0.4)}, 3, 4, 5.0)}
    back = on_pictures._from_json(on_pictures._to_json(rows))
    assert back["a"].figures["loss"].value == 0.4
    assert (back["a"].figures["loss"].replicates == rows["a"].figures["loss"].replicates).all()
    assert (back["a"].upload_bytes, back["a"].download_bytes, back["a"].seconds) == (3, 4, 5.0)


class _Fake:
    """A base whose scores are the rows themselves."""

    def scores(self, attacks, task, weights, rows, generated_rows=0):
        return {"loss": np.array(rows, dtype=float), "image 10%": np.zeros(len(rows))}


def test_an_attack_is_scored_against_the_right_non_members():
    others = adversary.NonMembers([1.0, 2.0], ["x", "y"], [9.0, 9.0, 9.0])
    settings = {"generated_rows": 0, "shifted": ["loss"], "rows": 100}
    made = adversary.Adversary(_Fake(), None, others, settings, 0)
    found = made.attacked(None, [adversary.Target((), {}, [3.0, 1.5, 1.5, 0.0])])
    assert found["loss"].value == pytest.approx((2 + 1 + 1 + 0) / 8)
    assert found["shifted loss"].value == 0.0
    assert found["image 10%"].value == 0.5
    assert set(found) == {"loss", "image 10%", "shifted loss"}
    capped = adversary.Adversary(_Fake(), None, others, settings | {"rows": 2}, 0)
    assert capped.attacked(None, [adversary.Target((), {}, [3.0, 3.0, 3.0])])["loss"].count == 2


def test_an_unknown_folder_is_one_line(monkeypatch):
    def failing(settings, seed, options):
        raise ConfigError(f"no data for {settings['name']}")

    monkeypatch.setattr(on_pictures, "_of_seed", failing)
    monkeypatch.setattr(
        "sys.stdin", __import__("io").StringIO('{"settings": {"name": "x"}, "seed": 0, "quick": true, "device": "cpu"}')
    )
    said = []
    monkeypatch.setattr("sys.stdout", type("Out", (), {"write": said.append, "flush": lambda self: None})())
    seeds.serve(failing)
    assert said == ['{"error": "no data for x"}\n']


@pytest.mark.slow
def test_a_small_table_from_end_to_end():
    """Both controls, every kind of row, and FedAvg rebuilt exactly."""
    settings = {
        "clients": 3, "clients_scored": 1, "seeds": 1, "overfitted_members": 24, "controls": ["loss"], "errors": [],
        "methods": {"FedAvg": {"name": "fedavg"}, "FedRand": {"name": "fedrand"}},
        "attack": {"shadows": 2, "shadow_steps": 2, "aligned_rows": 20, "generated_rows": 5, "shifted": ["loss"], "rows": 50},
        "parts": [{"name": "", "data": "caltech-caption", "test": "caltech-caption", "shifted": "cifar-caption",
                   "metrics": ["test loss", "cider", "rouge_l", "bleu_4"], "members": 60, "held_out": 80, "test_rows": 10}],
        "config": {"task.model": "tiny", "task.partition": "iid", "train.batch-size": 8, "train.learning-rate": 3e-3,
                   "train.epochs": 2, "cohort.fraction": 0.6, "evaluate.max-new-tokens": 8, "run.rounds": 2},
    }  # fmt: skip
    answer = on_pictures._from_json(on_pictures._of_seed(settings, 0, Options()))
    assert set(answer) == {
        "round 0", "overfitted FedAvg", "FedAvg server", "FedAvg client", "FedRand server", "FedRand client",
        "FedRand client, merged",
    }  # fmt: skip
    assert answer["FedAvg client"].figures["reconstruction error"].value == 0.0
    assert answer["FedRand client"].figures["reconstruction error"].value > 0
    assert answer["overfitted FedAvg"].figures["loss"].value > 0.8
    assert answer["round 0"].figures["calibrated"].value == 0.5
    assert answer["FedRand server"].upload_bytes < 0.7 * answer["FedAvg server"].upload_bytes


def test_public_pictures_are_nobody_s():
    try:
        rows = pictures.examples("caltech-caption", "train")
    except ConfigError:
        pytest.skip("the benchmark's data are not here")
    assert len(rows) == 1957  # of 2454, 497 are what the base has seen
    assert (
        pictures.examples("caltech-choice", "test")[0]["choices"][
            pictures.examples("caltech-choice", "test")[0]["answer"]
        ]
        == (pictures.examples("caltech-choice", "test")[0]["label"])
    )
