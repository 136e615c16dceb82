"""`fedveil poc`: a whole pilot on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.config import parse
from fedveil.console.commands.getting_started.poc import complete_settings
from fedveil.console.launch.rehearsal import PilotRehearsal, RehearsedSite, list_site_folders
from fedveil.console.main import main
from fedveil.errors import ConfigError
from fedveil.runs import Run
from tests.conftest import ROOT


@pytest.fixture
def programs(monkeypatch):
    """This tree's `fedveil`, for the processes that the rehearsal starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_sites_are_the_folders_of_the_data(tmp_path):
    for name in ("south", "north", ".cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("")
    assert list_site_folders(tmp_path) == [
        RehearsedSite("north", tmp_path / "north"),
        RehearsedSite("south", tmp_path / "south"),
    ]


@pytest.mark.parametrize(
    "folders,reason",
    [
        ([], "has 0 folders"),
        (["north"], "has 1 folders"),
        (["north", "so uth"], "so uth cannot be a site's name"),
        (["north", "server"], "server cannot be a site's name"),
    ],
)
def test_other_data_is_refused(tmp_path, folders, reason):
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=reason):
        list_site_folders(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        list_site_folders(tmp_path / "none")


def test_a_given_run_keeps_its_keys():
    settings, added = complete_settings({"method.name": "fedavg", "cohort.sites": 2}, 3)
    assert settings == {
        "method.name": "fedavg", "cohort.sites": 2, "run.name": "rehearsal", "cohort.wait-seconds": 600.0,
    }  # fmt: skip
    assert added == {"run.name": "rehearsal", "cohort.wait-seconds": 600.0}
    parse(complete_settings({}, 3)[0])


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["--sites", "1"], "2 to 50 sites, not 1"),
        (["--sites", "3", "--data", "."], "omit one of the two"),
        (["--set", "run.roundz=1"], "did you mean run.rounds"),
        (["--set", "task.data-set=icu"], "have one data set each"),
    ],
)
def test_a_wrong_argument_creates_nothing(tmp_path, capsys, arguments, reason):
    assert main(["poc", str(tmp_path / "new"), *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_is_never_reused(tmp_path):
    with pytest.raises(ConfigError, match="exists; a rehearsal needs a new folder"):
        PilotRehearsal(tmp_path, [RehearsedSite("a"), RehearsedSite("b")], {}, print)


@pytest.mark.long
def test_a_run_that_real_sites_would_refuse_is_refused_before_anything_starts(tmp_path, capsys, programs):
    folder = tmp_path / "new"
    assert main(["poc", str(folder), "--set", "train.batch-size=2"]) == 2
    stderr = capsys.readouterr().err
    assert "error: This policy still refuses the run: train.batch-size: this run takes steps of at most 2" in stderr
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "run.toml", "site-policy.toml"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_pilot_is_rehearsed_from_provision_to_report(tmp_path, capsys, programs):
    data = tmp_path / "hospitals"
    for number, name in enumerate(("north", "south")):
        (data / name).mkdir(parents=True)
        rows = [{"mr": f"name[{number} {row}]", "ref": f"It is called {number} {row}."} for row in range(150)]
        (data / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, before = tmp_path / "pilot", {process.pid for process in psutil.process_iter()}
    arguments = ["--data", str(data), "--device", "cpu", "--set", "method.name=fedavg", "--set", "run.rounds=1"]
    assert main(["poc", str(folder), *arguments, "--set", "train.max-steps=8"]) == 0
    run = Run(folder / "operator" / "rehearsal" / "runs" / "rehearsal")
    assert run.state == "completed"
    assert (folder / "report.html").stat().st_size > 1000
    for name in ("north", "south"):
        kit = folder / "sites" / name
        policy = SitePolicy.model_validate(tomllib.loads((kit / "site-policy.toml").read_text()))
        assert policy.methods == ["fedavg"]
        assert policy.min_examples == 100
        assert tomllib.loads((kit / "node-config.toml").read_text())["data"] == str(data / name)
        assert not list((data / name).glob(".fedveil*"))  # a rehearsal leaves no mark on real data
        events = [json.loads(line)["event"] for line in (kit / "state" / "audit-log.jsonl").read_text().splitlines()]
        assert "sent" in events
    left = [process for process in psutil.process_iter(["name"]) if process.pid not in before and _of(process, folder)]
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_process_is_killed_is_resumed(tmp_path, programs):
    """`fedveil submit --resume 1`: kill -9 after the first round that counts, and the run ends with all rounds."""
    settings = {
        "method.name": "fedavg", "run.name": "killed", "run.rounds": 4, "train.max-steps": 8, "cohort.sites": 2,
        "cohort.wait-seconds": 300.0,
    }  # fmt: skip
    sites = [RehearsedSite("north"), RehearsedSite("south")]
    with PilotRehearsal(tmp_path / "pilot", sites, settings, print, "cpu") as pilot:
        pilot.write_policy()
        pilot.provision()
        pilot.enroll()
        pilot.start_sites()
        run = pilot.operator / "runs" / "killed"
        fedveil = str(Path(sys.executable).with_name("fedveil"))
        command = [fedveil, "submit", "--federation", str(pilot.operator), "--config", str(pilot.run_file)]
        submit = subprocess.Popen([*command, "--resume", "1"], stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 240
        while '"round": 0' not in (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").is_file() else True:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        psutil.Process(json.loads((run / "lock").read_text())["pid"]).kill()
        output, _ = submit.communicate(timeout=300)
    assert submit.returncode == 0, output
    assert "resuming it in 15 s (1 of 1)" in output
    assert Run(run).state == "completed"
    assert {row["round"] for row in Run(run).metrics} == {1, 2, 3, 4}


def _of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
