"""Rows of core/simulation, from an engine that the test provides."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from fedveil.errors import ConfigError
from fedveil_bench.core import simulated
from fedveil_bench.runner import BenchOptions

SETTINGS = {"nodes": [10, 100], "rounds": 3, "seconds": 9, "config": {"train.max-steps": 1}}


class Engine:
    """A run takes 0.1 s for each node, twice that in its first round."""

    asked: list[dict]
    state = "completed"

    def __init__(self) -> None:
        self.processes = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def alive(self):
        return [psutil.Process(os.getpid())]

    def run(self, nodes, settings, timeout):
        Engine.asked.append({"nodes": nodes, "timeout": timeout} | settings)
        folder = Path(settings["run.dir"]) / settings["run.name"]
        folder.mkdir(parents=True)
        lines = [{"round": -1, "scores": {}}]
        for round_ in range(3):
            lines.append({"round": round_, "accepted": [], "seconds": 0.1 * nodes * (2 if round_ == 0 else 1)})
            lines[-1]["upload_bytes"] = 7 * nodes
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"state": Engine.state}


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    monkeypatch.setattr(Engine, "asked", [], raising=False)


def test_rows_and_exponents_by_the_number_of_nodes(tmp_path):
    options = BenchOptions(simulation=Engine, pieces=tmp_path / "x.jsonl")
    outcome = simulated.run_benchmark(SETTINGS, options)
    ten, hundred, exponents = outcome.rows
    assert ten["metrics"]["first round s"]["mean"] == pytest.approx(2.0)
    assert hundred["metrics"]["later rounds s"]["mean"] == pytest.approx(10.0)
    assert hundred["upload_bytes"] == 700
    assert exponents["metrics"]["a of seconds ~ N^a"]["mean"] == pytest.approx(1.0)
    assert [asked["cohort.min-sites"] for asked in Engine.asked] == [10, 100]
    simulated.run_benchmark(SETTINGS, options)
    assert len(Engine.asked) == 2  # the pieces have them


def test_a_run_that_did_not_complete_gives_no_row(monkeypatch):
    monkeypatch.setattr(Engine, "state", "failed")
    with pytest.raises(ConfigError, match="10 nodes: expected a completed run"):
        simulated.run_benchmark(SETTINGS, BenchOptions(simulation=Engine))
    with pytest.raises(ConfigError, match="fedveil bench core/simulation"):
        simulated.run_benchmark(SETTINGS, BenchOptions())
