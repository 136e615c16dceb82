"""`fedveil stop`: through Flower's control port, with what sites keep; nothing that has ended is stopped."""

from __future__ import annotations

import json

import pytest

from fedveil.console.commands.runs import stop
from fedveil.console.flower.flwr_cli import FlowerCli, write_connection
from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.records import process_exit

pytestmark = pytest.mark.usefixtures("signal_handlers")
RESUME = "resume it: fedveil submit --federation FOLDER --config r.toml"
TOLD = {"state": "failed", "round": 1, "rounds": 5, "reason": f"{process_exit.TOLD_TO_END}; {RESUME}"}


@pytest.fixture
def pilot(tmp_path, monkeypatch):
    """A federation's folder with the run "first", number 77, and the runs that Flower was told to stop."""
    home = tmp_path / "pilot" / "server" / "flower"
    home.mkdir(parents=True)
    write_connection(home, "127.0.0.1:9", home.parent / "ca.crt")
    run = tmp_path / "pilot" / "runs" / "first"
    run.mkdir(parents=True)
    (run / "flower-run").write_text("77")
    write(run, {"state": "running", "round": 1, "rounds": 5})
    stopped = []

    def stop_run(self, number):
        stopped.append(number)
        write(run, TOLD)

    monkeypatch.setattr(FlowerCli, "run_status", lambda self, number: "running")
    monkeypatch.setattr(FlowerCli, "stop", stop_run)
    monkeypatch.chdir(tmp_path)
    return run, stopped


def write(run, content):
    (run / "status.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["77", "first", "runs/first", "pilot/runs/first"])
def test_a_run_is_stopped_by_its_number_its_name_or_its_folder(pilot, capsys, name):
    assert main(["stop", name, "--federation", "pilot"]) == 0
    assert pilot[1] == ["77"]
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "run 77: the server has stopped it"
    assert second.startswith("first: stopped: its ServerApp was told to end; resume it: fedveil submit --federation /")
    assert third == stop.SITES_KEEP


@pytest.mark.parametrize(
    ("state", "words"), [("completed", "completed"), ("failed", "failed"), ("stopped", "been stopped")]
)
@pytest.mark.parametrize("name", ["77", "first"])
def test_a_run_that_has_ended_is_refused_before_the_server_is_asked(pilot, monkeypatch, capsys, state, words, name):
    write(pilot[0], TOLD if state == "stopped" else {"state": state, "round": 1, "rounds": 5})
    monkeypatch.setattr(FlowerCli, "run_status", None)
    assert main(["stop", name, "--federation", "pilot"]) == 2
    assert f"expected a run that has not ended, found that pilot/runs/first has {words}" in capsys.readouterr().err
    assert pilot[1] == []


def test_a_run_that_has_ended_for_flower_is_refused(pilot, monkeypatch, capsys):
    monkeypatch.setattr(FlowerCli, "run_status", lambda self, number: "finished:completed\x1b[2J")
    assert main(["stop", "78", "--federation", "pilot"]) == 2
    error = capsys.readouterr().err
    assert r"found finished:completed\x1b[2J for run 78" in error
    assert pilot[1] == []


def test_a_run_without_a_folder_here_is_stopped_by_its_number(pilot, capsys):
    assert main(["stop", "78", "--federation", "pilot"]) == 0
    assert pilot[1] == ["78"]
    assert capsys.readouterr().out == f"run 78: the server has stopped it\n{stop.SITES_KEEP}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["77"], "a number needs --federation"),
        (["frist", "--federation", "pilot"], "did you mean first? expected a run folder or a number"),
        (["pilot/runs/first"], "stopping a run needs --federation"),
        (["77", "--federation", "nowhere"], "found no server/flower/config.toml"),
        (["pilot", "--federation", "pilot"], "expected a run's status.json or config.json"),
    ],
)
def test_what_cannot_be_stopped_is_refused(pilot, capsys, arguments, words):
    assert main(["stop", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert pilot[1] == []


def test_a_folder_without_its_number_is_refused(pilot, capsys):
    (pilot[0] / "flower-run").write_text("77; rm")
    assert main(["stop", "first", "--federation", "pilot"]) == 2
    assert "expected Flower's run ID in pilot/runs/first/flower-run" in capsys.readouterr().err


def test_a_server_that_refuses_is_an_error(pilot, monkeypatch, capsys):
    def refuses(self, number):
        raise LaunchError("flwr stop failed: operator anna may not stop runs")

    monkeypatch.setattr(FlowerCli, "stop", refuses)
    assert main(["stop", "first", "--federation", "pilot"]) == 2
    assert capsys.readouterr().err == "error: flwr stop failed: operator anna may not stop runs\n"


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [({"state": "completed"}, 1, "first: completed"), ({"state": "failed", "reason": "no data"}, 1, "failed: no data"),
     ({"state": "running", "round": 1, "rounds": 5}, 4, "its ServerApp has not ended yet")],
)  # fmt: skip
def test_a_run_that_ends_by_itself_or_goes_on_is_said(pilot, monkeypatch, capsys, content, code, words):
    monkeypatch.setattr(FlowerCli, "stop", lambda self, number: write(pilot[0], content))
    assert main(["stop", "first", "--federation", "pilot", "--timeout", "0.1"]) == code
    assert words in capsys.readouterr().out


def test_an_interruption_says_what_is_known(pilot, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stop, "until_ended", interrupted)
    assert main(["stop", "first", "--federation", "pilot"]) == 130
    assert "the server has stopped the run; only the waiting was interrupted" in capsys.readouterr().err
    monkeypatch.setattr(FlowerCli, "stop", interrupted)
    write(pilot[0], {"state": "running", "round": 1, "rounds": 5})
    assert main(["stop", "first", "--federation", "pilot"]) == 130
    assert "the run may have been stopped; list runs with: " in capsys.readouterr().err


def test_a_dead_serverapp_counts_as_stopped(pilot, monkeypatch, capsys):
    """Flower kills a ServerApp that does not end by itself."""
    state = iter(["running", "died"])
    monkeypatch.setattr(stop, "status_of", lambda folder: {"state": next(state, "died"), "reason": "killed"})
    monkeypatch.setattr(FlowerCli, "stop", lambda self, number: None)
    assert main(["stop", "first", "--federation", "pilot"]) == 0
    assert "first: stopped, as reported by Flower" in capsys.readouterr().out
