"""The preset's runner, on one method and two rounds."""

from __future__ import annotations

import tomllib

import pytest

from fedveil_bench import folders
from fedveil_bench.broadcast import honest
from fedveil_bench.runner import BenchOptions

PRESET = tomllib.loads((folders.presets_folder() / "broadcast/honest.toml").read_text())["settings"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["FedAvg", "FedAvg, noisy steps"])
def test_an_honest_run_begins_at_the_first_weights_and_moves(name):
    config = PRESET["config"] | {"run.rounds": 2, "train.max-steps": 1}
    settings = PRESET | {"config": config, "pictures": 1, "rows": {name: PRESET["rows"][name]}}
    outcome = honest.run_benchmark(settings, BenchOptions())
    figures = {key: of["mean"] for key, of in outcome.rows[0]["metrics"].items()}
    assert figures["first"] == 0.0
    assert 0.0 < figures["change"] < 2.0
    assert figures["drift"] == pytest.approx(figures["change"])  # one step away
    assert outcome.verdicts[0] == f"The largest first is 0.00, of {name}."
