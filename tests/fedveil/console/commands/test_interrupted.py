"""Ctrl-C of `fedveil submit` and `fedveil watch`: the run goes on, and what is said is how to follow and to stop it."""

from __future__ import annotations

import json
import types

import pytest
from rich.console import Console

from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError, write_connection
from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.console.runs.run_follower import RunFollower
from fedveil.console.runs.run_lookup import flower_run


@pytest.fixture
def pilot(tmp_path, monkeypatch):
    """A federation's folder with a space in its path, and a run 77 that Flower knows; stands beside it."""
    home = tmp_path / "a pilot" / "server" / "flower"
    home.mkdir(parents=True)
    write_connection(home, "127.0.0.1:9", tmp_path / "ca.crt")
    monkeypatch.setattr(FlowerCli, "submit", lambda self, app, settings: "77")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "a pilot"


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", [["submit"], ["watch", "77"]])
def test_the_run_goes_on_and_the_commands_are_said(pilot, monkeypatch, capsys, command):
    monkeypatch.setattr(FlowerCli, "run_status", interrupted)
    assert main([*command, "--federation", "a pilot"]) == 130
    home = f"'{pilot}/server/flower'"
    assert capsys.readouterr().err == (
        f"interrupted: the run continues; follow it with: fedveil watch 77 --flower-home {home}; "
        f"stop it with: fedveil stop 77 --flower-home {home}\n"
    )


def test_a_flower_that_fails_ends_the_following_alone(pilot, monkeypatch, capsys):
    def fails(*_):
        raise LaunchError("flwr ls failed")

    monkeypatch.setattr(FlowerCli, "run_status", fails)
    assert main(["submit", "--federation", "a pilot"]) == 2
    assert "error: flwr ls failed; the run may continue; follow it with: fedveil watch 77 " in capsys.readouterr().err


def test_a_silence_of_seconds_is_not_worth_a_word(pilot, monkeypatch, capsys):
    """A server that is stopped falls silent before the end of its run is known."""
    now, answers = [0.0], iter(["running", None, None, "finished:stopped"])
    for name in ("_ASK_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(f"fedveil.console.runs.run_follower.{name}", 0.01)
    monkeypatch.setattr("fedveil.console.runs.run_follower.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def status(self, run):
        now[0] += 7.0
        if (text := next(answers)) is None:
            raise ServerUnreachableError("nobody there")
        return text

    monkeypatch.setattr(FlowerCli, "run_status", status)
    monkeypatch.setattr(FlowerCli, "log", lambda *_: "")
    assert main(["watch", "77", "--federation", "a pilot"]) == 3
    text = capsys.readouterr().out
    assert "does not answer" not in text
    assert "answers again" not in text


@pytest.mark.parametrize("seconds, code", [(200.0, 0), (400.0, 2)])
def test_a_server_that_answered_is_waited_for(pilot, monkeypatch, capsys, seconds, code):
    """As one that is started anew; for five minutes, and then it is an error as before."""
    now = [1000.0]
    for name in ("_ASK_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(f"fedveil.console.runs.run_follower.{name}", 0.01)
    monkeypatch.setattr("fedveil.console.runs.run_follower.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def status(self, run):
        now[0] += 100.0
        if now[0] == 1100.0:
            return "running"
        if now[0] <= 1100.0 + seconds:
            raise ServerUnreachableError("nobody there")
        return "finished:completed"

    monkeypatch.setattr(FlowerCli, "run_status", status)
    monkeypatch.setattr(FlowerCli, "log", lambda *_: "")
    assert main(["watch", "77", "--federation", "a pilot"]) == code
    output = capsys.readouterr()
    assert output.out.count("the server does not answer; retrying for 300 s") == 1
    assert ("the server answers again" in output.out) == (code == 0)
    assert ("nobody there; the run may continue" in output.err) == (code == 2)


def test_a_server_that_never_answered_is_an_error_at_once(pilot, monkeypatch, capsys):
    def status(self, run):
        raise ServerUnreachableError("nobody there")

    monkeypatch.setattr(FlowerCli, "run_status", status)
    monkeypatch.setattr("fedveil.console.runs.run_follower._SILENT_SECONDS", 1.0)
    assert main(["watch", "77", "--federation", "a pilot"]) == 2
    assert "retrying" not in capsys.readouterr().out


def test_an_interrupted_submission_says_where_to_look(pilot, monkeypatch, capsys):
    monkeypatch.setattr(FlowerCli, "submit", interrupted)
    assert main(["submit", "--federation", "a pilot"]) == 130
    stderr = capsys.readouterr().err
    assert "the run may have been submitted" in stderr
    assert f"FLWR_HOME='{pilot}/server/flower' flwr ls\n" in stderr


def test_a_folder_alone_names_the_run_by_its_number(pilot, monkeypatch, capsys):
    made = pilot / "runs" / "first"
    made.mkdir(parents=True)
    (made / "flower-run").write_text("77")
    (made / "status.json").write_text(json.dumps({"state": "running", "round": 0, "rounds": 1}))
    monkeypatch.setattr("fedveil.console.runs.run_follower.RunProgress.tick", interrupted)
    assert main(["watch", str(made)]) == 130
    stderr = capsys.readouterr().err
    assert f"fedveil watch '{made}'; stop it with: fedveil stop '{made}' --federation PILOT\n" in stderr


def test_of_a_run_that_has_ended_nothing_goes_on(pilot, monkeypatch, capsys):
    made = pilot / "runs" / "first"
    made.mkdir(parents=True)

    def fails(*_):
        (made / "status.json").write_text(json.dumps({"state": "failed", "round": 0, "rounds": 1}))
        raise KeyboardInterrupt

    (made / "status.json").write_text(json.dumps({"state": "running", "round": 0, "rounds": 1}))
    monkeypatch.setattr("fedveil.console.runs.run_follower.RunProgress.tick", fails)
    assert main(["watch", str(made)]) == 130
    assert capsys.readouterr().err == "interrupted: the run has ended: failed\n"


def test_a_number_finds_the_runs_folder_in_the_federation(pilot, monkeypatch, capsys):
    """Into a file, where no bar shows that the run is alive."""
    made = pilot / "runs" / "first"

    def pending(self, run):
        made.mkdir(parents=True)
        (made / "flower-run").write_text("77")
        (made / "status.json").write_text(json.dumps({"state": "completed", "round": 0, "rounds": 1}))
        return "pending"

    monkeypatch.setattr(FlowerCli, "run_status", pending)
    assert main(["watch", "77", "--federation", "a pilot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["run 77: pending", f"its folder is {made}"]


def test_what_a_run_folder_says_is_no_command_to_type(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for text, number in (("77\n", "77"), ("77; rm -r ~", ""), ("", ""), ("9" * 999, "9" * 40)):
        (run / "flower-run").write_text(text)
        followed = RunFollower(Console(), "", [run], None)
        followed.folder = run
        assert (flower_run(run), followed._number()) == (number, number)
        assert followed.by_hand().endswith(f"; stop it with: fedveil stop {run} --federation PILOT")


def test_the_command_that_resumes_a_run_has_the_federation_s_folder_where_that_is_known(tmp_path):
    word, filled = "failed: x; resume it: fedveil submit --federation FOLDER --config /r/resume.toml", []
    for place in (tmp_path / "a pilot" / "server" / "flower", tmp_path / "flower"):
        place.mkdir(parents=True)
        write_connection(place, "127.0.0.1:1", tmp_path / "ca.crt")
        filled.append(RunFollower(Console(), "", [], FlowerCli(place))._filled(word))
    assert filled == [word.replace("FOLDER", f"'{tmp_path}/a pilot'"), word]
    assert RunFollower(Console(), "", [], None)._filled(word) == word
