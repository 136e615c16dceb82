"""The run in Weights & Biases, as a module that stands in for wandb gets it: wandb is in no lock."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest

from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.server_app.metrics.sinks import SinkRunInfo, wandb
from tests.server_app.metrics.sinks.runs import HOSTILE, TOLD


class FakeRun:
    def __init__(self, given: dict) -> None:
        self.given, self.lines, self.summary, self.metrics, self.exit_code = given, [], {}, [], None

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, line):
        self.lines.append(line)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def started(monkeypatch) -> list[FakeRun]:
    """The runs that were started in the module that is imported as wandb."""
    started: list[FakeRun] = []
    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Settings = lambda **settings: settings
    module.init = lambda **given: started.append(FakeRun(given)) or started[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    return started


def test_wandb_gets_every_figure_and_a_resumed_run_has_its_own_id(started, tmp_path):
    about = SinkRunInfo(tmp_path / "run", "ab", parse({"method.name": "fedqsn"}))
    sink = wandb.create(about)
    assert started == []  # nothing before there is a figure
    sink.write(TOLD)
    sink.write(replace(TOLD, step=3, failed={}))  # an attempt's second part
    sink.close("failed")
    (run,) = started
    assert run.lines[0] == {"round": 3} | {figure.path: figure.value for figure in TOLD.figures}
    assert run.metrics == [("*", "round")]
    assert run.exit_code == 1
    assert run.given["config"]["method.name"] == "fedqsn"
    assert (run.given["project"], run.given["name"], run.given["resume"]) == ("fedveil", "run", None)
    assert run.given["dir"] == str(tmp_path / "run")
    reason = run.summary["failed/south"]
    assert reason.startswith("round 3: ")
    assert "\n" in HOSTILE
    assert "\n" not in reason

    wandb.create(replace(about, is_resumed=True)).write(TOLD)
    wandb.create(replace(about, id="cd")).write(TOLD)
    assert started[1].given["resume"] == "allow"
    assert started[0].given["id"] == started[1].given["id"] != started[2].given["id"]


@pytest.mark.parametrize(
    "environment,mode",
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_nothing_is_sent_unless_the_environment_says_so(started, tmp_path, monkeypatch, environment, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wandb.create(SinkRunInfo(tmp_path / "run", "ab", parse({}))).write(TOLD)
    assert started[0].given["mode"] == mode


def test_nothing_of_the_machine_or_its_code_is_logged(started, tmp_path):
    config = parse({"task.data": "/secret/folder", "run.dir": "/secret/runs"})
    wandb.create(SinkRunInfo(tmp_path / "run", "ab", config)).write(TOLD)
    given = started[0].given
    assert given["settings"]["host"] == "fedveil"
    assert given["settings"]["console"] == "off"
    for name in ("disable_code", "disable_git", "x_disable_meta", "x_disable_stats", "x_disable_machine_info"):
        assert given["settings"][name] is True
    assert given["settings"]["x_save_requirements"] is False
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert "secret" not in str(given["config"])


def test_a_run_is_told_round_by_round(started, runs):
    runs.go(sinks__use="wandb")
    assert "sinks" not in runs.status
    (run,) = started
    assert run.exit_code == 0
    assert {line["round"] for line in run.lines} == {1, 2}


def test_a_package_that_is_missing_is_refused_with_what_installs_it(runs, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    with pytest.raises(ConfigError, match=r"sinks.use: wandb needs the package wandb .*; next step: pip install wandb"):
        runs.go(sinks__use="wandb")
    assert runs.grid.pushed == []
