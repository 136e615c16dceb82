"""The app on Flower's simulation engine, the same app."""

from __future__ import annotations

import json

import psutil
import pytest

from fedveil.console.flower.simulation import LocalSimulation
from tests.conftest import ROOT

NODES = 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_app_runs_on_the_simulation_engine_on_as_many_nodes_as_asked_for(tmp_path):
    pytest.importorskip("ray", reason='needs the extra "simulation"')
    data = str(ROOT / "data" / "e2e")
    settings = {
        "task.data": data,
        "task.evaluation": data,
        "run.rounds": 2,
        "run.dir": str(tmp_path),
        "run.name": "simulated",
        "train.max-steps": 2,
        "evaluate.generate": "never",
        "evaluate.eval-examples": 4,
        "cohort.sites": NODES,
    }
    with LocalSimulation() as simulation:
        status = simulation.run(NODES, settings, 350)
        started = [process.pid for process in simulation.processes.alive()]
    assert status["state"] == "completed", status
    metrics = [json.loads(x) for x in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    sites = [f"partition-{i}" for i in range(NODES)]
    assert [sorted(m["accepted"]) for m in metrics[1:]] == [sites] * 2
    assert started  # Flower's SuperLink, which would stay
    assert not [pid for pid in started if psutil.pid_exists(pid)]
