"""What the simulation is started with. That it runs: tests/deployment/test_simulation.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fedveil.console.flower.processes import LaunchError
from fedveil.console.flower.simulation import LocalSimulation


def test_without_the_engine_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="lock/simulation.txt"):
        LocalSimulation()


def test_the_number_of_nodes_and_the_run_config_reach_flower(monkeypatch, tmp_path):
    """And a port of its own, so that no SuperLink of somebody else's run is taken for it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    called = []

    def call(name, command, env, timeout):
        called.append((command, Path(command[command.index("-c") + 1]).read_text(), env, timeout))
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "status.json").write_text(json.dumps({"state": "completed"}))
        return ""

    with LocalSimulation() as simulation:
        monkeypatch.setattr(simulation.processes, "call", call)
        folder = simulation._folder
        assert simulation.run(200, {"run.dir": str(tmp_path), "run.name": "a", "train.max-steps": 3}, 99.0) == {
            "state": "completed"
        }
    (command, config, env, timeout) = called[0]
    assert command[command.index("--federation-config") + 1] == "num-supernodes=200 client-resources-num-cpus=1"
    assert "max-steps" in config
    assert timeout == 99.0
    assert env["FLWR_LOCAL_CONTROL_API_PORT"] != env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    assert not folder.exists()
