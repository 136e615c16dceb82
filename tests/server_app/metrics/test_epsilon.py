"""Each site's epsilon after each attempt: that of the report, and none where there is none."""

from __future__ import annotations

import json
import math

import pytest

from fedveil.config import parse
from fedveil.contract.privacy import Adjacency, Step
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.server_app.metrics import epsilon
from fedveil.server_app.metrics.dispatcher import MetricsDispatcher
from fedveil.server_app.metrics.epsilon import make_epsilon_sink
from fedveil.server_app.metrics.samples import samples_from_line

CONFIG = parse({"dp.clip-norm": 1.0, "dp.noise-multiplier": 3.14159, "train.batch-size": 8})
CLAIM = DpSgdConfig.from_config(CONFIG.dp)


def row(round_, **steps):
    reports = {site: {"num_examples": 80, "steps": count, "loss_received": 1.0} for site, count in steps.items()}
    return {
        "round": round_, "attempt": 0, "cohort": [*steps, "silent"], "accepted": list(steps), "failed": {"silent": "x"},
        "upload_bytes": 1, "download_bytes": 1, "seconds": 1.0, "reports": reports, "unseen": {}, "scores": {},
    }  # fmt: skip


class Kept:
    def __init__(self):
        self.found = {}
        self.rows = []

    def write(self, told):
        self.rows.append(told)
        self.found[told.step] = self.found.get(told.step, {}) | {f.path: f.value for f in told.figures}

    def close(self, state): ...


def written(metrics, rows, claim=CLAIM, config=CONFIG):
    sink = Kept()
    open_ = MetricsDispatcher({"kept": sink}, make_epsilon_sink(claim, config, metrics))
    for each in rows:
        open_.put(samples_from_line(each, {}))
    open_.close("completed")
    return sink, open_.ended()


def by_hand(steps):
    charges = {Step("poisson", 80, 8, 3.14159): steps}
    return accounting.compute_epsilon(charges, 1e-5, Adjacency.REPLACE_ONE)


def test_epsilon_grows_with_the_rounds_and_is_the_accountant_s(tmp_path):
    sink, ended = written(tmp_path / "metrics.jsonl", [row(0, north=10, south=10), row(1, north=10)])
    assert ended == {}
    path = "site_epsilon/{}/1e-05/replace-one"
    assert sink.found[1][path.format("north")] == pytest.approx(by_hand(10))
    assert sink.found[2][path.format("north")] == pytest.approx(by_hand(20))
    assert path.format("south") not in sink.found[2]  # it took no part in it
    assert not any("silent" in name and "epsilon" in name for of in sink.found.values() for name in of)
    assert [metrics.row["round"] for metrics in sink.rows].count(0) == 2
    assert all(not metrics.failed for metrics in sink.rows if metrics.figures[0].name == "site_epsilon")


def test_after_a_resume_the_attempts_before_it_count(tmp_path):

    file = tmp_path / "metrics.jsonl"
    again = row(0, north=10) | {"attempt": 1}
    lines = [{"round": -1, "scores": {}}, row(0, north=10), again, {"round": 1, "resumed": True}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sink, _ = written(file, [row(1, north=10)])
    assert sink.found[2]["site_epsilon/north/1e-05/replace-one"] == pytest.approx(by_hand(30))


def test_no_claim_and_seeded_noise_and_infinite_ones_have_no_figure(tmp_path):
    rows = [row(0, north=10)]
    for claim, config in (
        (None, CONFIG),
        (CLAIM, CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"deterministic": True})})),
        (DpSgdConfig(1.0, 0.0, 0.1), CONFIG),
    ):
        sink, ended = written(tmp_path / "metrics.jsonl", rows, claim, config)
        assert ended == {}
        assert not [name for name in sink.found[1] if "epsilon" in name]
    assert math.isinf(accounting.compute_epsilon({Step("poisson", 80, 8, 0.0): 1}, 1e-5, Adjacency.REPLACE_ONE))


def test_accounting_that_takes_too_long_ends_and_the_other_figures_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(epsilon, "MOST_SECONDS", -1.0)
    sink, ended = written(tmp_path / "metrics.jsonl", [row(0, north=10), row(1, north=10)])
    assert "accounting takes more than" in ended["epsilon"]
    assert [metrics.step for metrics in sink.rows] == [1, 2]
