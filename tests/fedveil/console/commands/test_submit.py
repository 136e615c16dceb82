"""`fedveil submit`: the run's own folder says what became of it, and the exit code with it."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from fedveil.console.flower.app_bundle import copy_app
from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.flower.processes import LaunchError, ProcessGroup
from fedveil.console.main import main


@pytest.fixture
def flower(monkeypatch, tmp_path):
    """Flower that takes every app and then knows the run as failed; what it was given."""
    given = []

    class Fake:
        def __init__(self, home):
            self.home = home
            given.append(home)

        def submit(self, app, settings):
            given.append((app, settings))
            return "77"

        def run_status(self, number):
            given.append(number)
            return "finished:failed"

        def log(self, number):
            return self.printed

        printed = ""

    monkeypatch.setattr("fedveil.console.commands.runs.submit.FlowerCli", Fake)
    return given


def folder(tmp_path, state, number="77", name="first"):
    made = tmp_path / "runs" / name
    made.mkdir(parents=True)
    (made / "flower-run").write_text(number)
    (made / "status.json").write_text(
        json.dumps({"state": state, "round": 0, "rounds": 1, "reason": "round 0: too few"})
    )
    attempt = {"round": 0, "accepted": ["a"], "cohort": ["a", "b"], "failed": {"b": "PolicyError: no"}, "seconds": 3.14}
    (made / "metrics.jsonl").write_text(json.dumps(attempt | {"upload_bytes": 27182}) + "\n")


def submitted(tmp_path, *more):
    return main(
        ["submit", str(tmp_path), "--federation", str(tmp_path), "--set", f"run.dir={tmp_path / 'runs'}", *more]
    )


@pytest.mark.parametrize("state,code", [("completed", 0), ("failed", 1)])
def test_the_exit_code_is_what_the_run_says_of_itself(tmp_path, flower, capsys, state, code):
    folder(tmp_path, state)
    assert submitted(tmp_path, "--set", "run.name=first", "--set", "run.rounds=1") == code
    assert flower[1][1] == {"run.dir": str(tmp_path / "runs"), "run.name": "first", "run.rounds": 1}
    assert "77" not in flower
    stdout = capsys.readouterr().out
    assert "first: round 1/1    3.1 s  1 of 2 sites, too few  up 27,182 B; b: PolicyError: no" in stdout
    assert stdout.count("round 1/1") == 1
    assert f"its folder is {tmp_path / 'runs' / 'first'}" in stdout
    assert f"next: fedveil report {tmp_path / 'runs' / 'first'}" in stdout


def test_a_guarantee_that_promises_nothing_is_warned_of_before_it_is_sent(tmp_path, flower, capsys):
    folder(tmp_path, "completed")
    noisy = ["run.name=first", "run.rounds=1", "dp.clip-norm=1.0", "dp.noise-multiplier=1e-9", "dp.delta=0.5"]
    noisy += ["task.max-tokens=64"]
    assert submitted(tmp_path, *(word for pair in noisy for word in ("--set", pair))) == 0
    stderr = capsys.readouterr().err
    assert "warning: delta 0.5 is at least 0.01" in stderr
    assert "warning: a noise multiplier of 1e-09 hides nothing" in stderr


def test_a_folder_that_is_no_federation_is_named_as_it_was_given(tmp_path, capsys):
    assert main(["submit", "--federation", str(tmp_path / "pilt"), "--extras-at-server"]) == 2
    message = f"{tmp_path}/pilt: expected a folder made by fedveil provision, found no server/flower/config.toml in it"
    assert f"error: {message}; name that folder" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="FLWR_HOME: expected config.toml in .*; name the folder that contains it"):
        FlowerCli(tmp_path)


def test_after_a_submission_without_an_answer_the_user_is_told_to_look_for_the_run(tmp_path, monkeypatch):
    """The server may have taken the app before flwr was ended."""
    (tmp_path / "config.toml").touch()
    call = ProcessGroup.call
    slow = ["sleep", "30"]
    monkeypatch.setattr(ProcessGroup, "call", lambda self, name, command, env, cwd: call(self, name, slow, env, 0.1))
    with pytest.raises(
        LaunchError, match=r"within 0 s; the server may have started the run: see FLWR_HOME=\S+ flwr ls"
    ):
        FlowerCli(tmp_path).submit(tmp_path, {})
    with pytest.raises(LaunchError, match="within 0 s$"):
        FlowerCli(tmp_path).nodes()


def test_a_round_is_shown_once(tmp_path, flower, capsys, monkeypatch):
    folder(tmp_path, "running")
    file = tmp_path / "runs" / "first" / "status.json"

    def run_status(self, number):
        file.write_text(file.read_text().replace("running", "completed"))
        return "finished:completed"

    monkeypatch.setattr("fedveil.console.commands.runs.submit.FlowerCli.run_status", run_status)
    assert submitted(tmp_path, "--set", "run.name=first") == 0
    assert capsys.readouterr().out.count("round 1/1") == 1


def test_an_earlier_run_of_that_name_does_not_count(tmp_path, flower):
    folder(tmp_path, "completed", number="76")
    assert submitted(tmp_path, "--set", "run.name=first") == 1
    assert flower[-1] == "77"


def test_a_run_without_a_name_is_found_by_its_number(tmp_path, flower):
    folder(tmp_path, "completed", name="run-77")
    assert submitted(tmp_path) == 0


def test_a_wrong_key_is_refused_before_anything_is_sent(tmp_path, flower, capsys):
    assert submitted(tmp_path, "--set", "run.round=1") == 2
    assert flower == []
    assert "run.round" in capsys.readouterr().err


def test_flower_gets_a_copy_without_what_no_bundle_holds(tmp_path):
    """And nothing is left of it; a folder that is no app is handed on as it is, for Flower's own words."""
    for name in (
        "pyproject.toml",
        ".gitignore",
        "fedveil/a.py",
        "fedveil/.hidden",
        ".venv/b.py",
        ".git/c",
        "runs/d",
        "build/e.py",
    ):
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).touch()
    with copy_app(tmp_path / "app") as copy:
        files = sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file())
    assert files == [".gitignore", "fedveil/.hidden", "fedveil/a.py", "pyproject.toml"]
    assert not copy.exists()
    with copy_app(tmp_path) as same:
        assert same == tmp_path


def test_a_run_that_left_no_folder_here_says_why_it_failed_and_where_the_server_has_it(
    flower, tmp_path, capsys, monkeypatch
):
    """A used name, a folder that cannot be written, a server elsewhere: Flower has what the ServerApp printed."""
    printed = (
        "INFO : fedveil: the run folder is /srv/runs/first\x1b[2J\n"
        "Traceback (most recent call last):\n  File x\n"
        "fedveil.errors.StateError: run folder /srv/runs/first: it already contains a run; choose\x1b[2J\n"
    )
    monkeypatch.setattr("fedveil.console.commands.runs.submit.FlowerCli.printed", printed)
    assert submitted(tmp_path, "--set", "run.name=first") == 1
    stdout = capsys.readouterr().out
    assert "failed: run folder /srv/runs/first: it already contains a run; choose" in stdout
    assert "the run folder is /srv/runs/first" in stdout
    assert "\x1b" not in stdout


def test_where_flower_gives_no_log_the_end_is_said_all_the_same(flower, tmp_path, capsys, monkeypatch):
    def log(self, number):
        raise LaunchError("flwr log failed: not permitted")

    monkeypatch.setattr("fedveil.console.commands.runs.submit.FlowerCli.log", log)
    assert submitted(tmp_path, "--set", "run.name=first") == 1
    assert "failed, as reported by Flower" in capsys.readouterr().out


def test_the_folder_of_a_server_that_was_started_from_its_federation_is_found(flower, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pilot").mkdir()
    folder(tmp_path / "pilot", "completed")
    assert main(["submit", str(tmp_path), "--federation", "pilot", "--set", "run.name=first"]) == 0
    assert f"its folder is {tmp_path}/pilot/runs/first" in capsys.readouterr().out


def test_the_end_says_rounds_scores_model_and_the_next_command(flower, make_run, tmp_path, capsys):
    made = make_run(method="first")
    (made / "final").mkdir()
    (made / "flower-run").write_text("77")
    settings = ["--set", f"run.dir={tmp_path}", "--set", "run.name=first"]
    assert main(["submit", str(tmp_path), "--federation", "pilot", *settings]) == 0
    *_, state, rounds, model, after = capsys.readouterr().out.splitlines()
    assert (state, model) == ("completed", f"model: {made}/final")
    assert rounds == "rounds: 3 of 3; last scores: bleu 21.2500, cider 0.8750, loss 3.1312"
    assert after == f"next: fedveil report {made}"


@pytest.fixture
def bare(monkeypatch):
    """An installation without any extra."""
    real_find_spec = importlib.util.find_spec
    extras = {"mlflow", "tensorboard", "prometheus_client"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in extras else real_find_spec(name))


@pytest.mark.parametrize("sink", ["mlflow", "tensorboard", "prometheus"])
def test_a_missing_extra_is_refused_before_anything_is_sent(tmp_path, flower, capsys, bare, sink):
    assert submitted(tmp_path, "--set", f"sinks.use={sink}") == 2
    stderr = capsys.readouterr().err
    assert f'sinks.use: {sink} needs the extra "{sink}" here' in stderr
    assert f"pip install --require-hashes --no-deps -r lock/{sink}.txt" in stderr
    assert "nothing was sent" in stderr
    assert "--extras-at-server" in stderr
    assert flower == []


def test_an_unknown_sink_is_refused_with_those_there_are(tmp_path, flower, capsys):
    assert submitted(tmp_path, "--set", "sinks.use=statsd") == 2
    expected = "found \"statsd\"; expected one of ['mlflow', 'prometheus', 'tensorboard', 'wandb']"
    assert expected in capsys.readouterr().err
    assert flower == []


def test_a_server_with_packages_of_its_own_is_asked_itself(tmp_path, flower, bare):
    folder(tmp_path, "completed")
    options = ["--set", "run.name=first", "--set", "sinks.use=mlflow", "--extras-at-server"]
    assert submitted(tmp_path, *options) == 0
    assert flower[1][1]["sinks.use"] == "mlflow"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["method.name=fedrnd"], "method.name"),
        (["method.params=rho = 3.0"], "rho"),
        (["method.params=roh = 0.3"], "roh"),
        (["dp.clip-norm=1.0", "dp.noise-multiplier=1.0", "method.name=dp_fpl"], "dp_fpl, which adds its own noise"),
        (
            ["dp.clip-norm=1.0", "dp.noise-multiplier=1.0", "method.name=fedavg"],
            "add task.max-tokens = 512, or another",
        ),
        (["aggregate.rule=multi-krum", "aggregate.num-byzantine=1", "cohort.min-sites=2"], "cohort.min-sites"),
        (["secure.enabled=true", "aggregate.rule=median"], "aggregate.rule"),
        (["evaluate.select-model=best", "evaluate.metric=nothing"], "evaluate.metric"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before_anything_is_sent(tmp_path, flower, capsys, wrong, said):
    """Of this installation's own app, whose methods are known here; where the server has its own, it is asked there."""
    words = [word for each in wrong for word in ("--set", each)]
    assert main(["submit", "--federation", str(tmp_path), *words]) == 2
    assert flower == []
    assert said in capsys.readouterr().err


def test_a_server_with_packages_of_its_own_may_know_another_method(tmp_path, flower):
    folder(tmp_path, "completed")
    more = ["--set", f"run.dir={tmp_path / 'runs'}", "--set", "run.name=first", "--set", "method.name=theirs"]
    assert main(["submit", "--federation", str(tmp_path), "--extras-at-server", *more]) == 0
    assert flower[1][1]["method.name"] == "theirs"


def own_app(tmp_path, *more):
    return main(["submit", "--federation", str(tmp_path), "--set", "run.name=first", *more])


@pytest.mark.parametrize("ended", [True, False])
def test_a_name_that_a_run_has_is_refused_before_anything_is_sent(tmp_path, flower, capsys, ended):
    folder(tmp_path, "completed" if ended else "running")
    assert own_app(tmp_path) == 2
    assert flower == []
    error = capsys.readouterr().err
    assert re.search(r"run folder .*runs/first: it already contains a run.*run\.name.*; nothing was sent", error)


@pytest.mark.parametrize("more", [("--set", "run.resume=true"), ("--set", "run.name=second"), ("--extras-at-server",)])
def test_another_name_a_resume_and_a_server_elsewhere_are_sent(tmp_path, flower, more):
    folder(tmp_path, "stopped")
    own_app(tmp_path, *more)
    assert any(isinstance(given, tuple) for given in flower)


LOST = {"state": "failed", "round": 0, "rounds": 1, "reason": "contact lost: no answer for 90 s"}


@pytest.fixture
def outcomes(monkeypatch, tmp_path):
    """Flower whose nth run leaves the nth of these statuses; the settings that each one was given."""
    given, left = [], []

    class Fake:
        def __init__(self, home):
            self.home = home

        def submit(self, app, settings):
            given.append(settings)
            made = tmp_path / "runs" / "first"
            made.mkdir(parents=True, exist_ok=True)
            (made / "flower-run").write_text(str(len(given)))
            (made / "status.json").write_text(json.dumps(left[min(len(given), len(left)) - 1]))
            (made / "resume.toml").write_text('run.name = "first"\nrun.resume = true\n')
            (made / "metrics.jsonl").write_text("")
            return str(len(given))

        def run_status(self, number):
            return "finished:failed"

        def log(self, number):
            return ""

    monkeypatch.setattr("fedveil.console.commands.runs.submit.FlowerCli", Fake)
    monkeypatch.setattr("fedveil.console.commands.runs.submit._RESUME_SECONDS", 0.0)
    return given, left


@pytest.mark.parametrize(
    "statuses,resumes,code,submissions",
    [
        ([LOST, LOST, {**LOST, "state": "completed", "reason": ""}], 3, 0, 3),
        ([LOST], 2, 1, 3),
        ([LOST], 0, 1, 1),
        ([{**LOST, "reason": "round 0: too few"}], 3, 1, 1),
        ([{**LOST, "reason": "interrupted: its ServerApp was told to end"}], 3, 3, 1),
        ([{**LOST, "state": "completed", "reason": ""}], 3, 0, 1),
    ],
)
def test_an_interrupted_run_is_resumed_and_no_other(tmp_path, capsys, outcomes, statuses, resumes, code, submissions):
    given, left = outcomes
    left.extend(statuses)
    assert submitted(tmp_path, "--set", "run.name=first", "--resume", str(resumes)) == code
    assert len(given) == submissions
    assert all(settings == {"run.name": "first", "run.resume": True} for settings in given[1:])
    assert capsys.readouterr().out.count("resuming it in") == submissions - 1


def test_a_negative_number_of_resumes_is_refused(tmp_path, capsys, flower):
    assert submitted(tmp_path, "--resume", "-1") == 2
    assert "--resume: expected 0 or more" in capsys.readouterr().err
