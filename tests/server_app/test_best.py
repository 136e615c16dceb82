"""Which round's model a run ends with, and when it stops: by algebra, and over deaths of the server."""

from __future__ import annotations

import json
import math
import os

import pytest
from flwr.app import ArrayRecord

from fedveil import rng, strategies, tasks
from fedveil.client_app.app import app
from fedveil.config import parse
from fedveil.console.runs import run_reader as runs_folder
from fedveil.console.runs.run_follower import closing_lines
from fedveil.contract.task import TaskMetric
from fedveil.errors import ConfigError, StateError
from fedveil.records.tensor_state import load_state, state_digest
from fedveil.server_app import checkpoints
from fedveil.server_app.evaluation import ModelSelection
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["north", "east", "south"]
SCORES = [2.0, 1.0, 1.5, 0.9, 1.6, 1.2]  # the best is of round 3, and the last but one is the worst since


class Killed(BaseException):
    """What no code catches, as no code catches SIGKILL."""


class Runs:
    """Runs with given scores by round, through Flower's messages in this process."""

    def __init__(self, monkeypatch, tmp_path) -> None:
        self.task, self.patch, self.at = use_toy_task(monkeypatch), monkeypatch, tmp_path / "runs"
        self.states: dict[int, str] = {}

    def go(self, name, resume=False, scores=SCORES, **keys) -> list[int]:
        flat = {"run.name": name, "run.rounds": len(SCORES), "run.deterministic": True, "run.seed": 9}
        flat |= {"cohort.wait-seconds": 1.0, "cohort.deadline-seconds": 1.0, "cohort.min-sites": 3}
        flat |= {"method.params": "rho = 0.5", "task.evaluation": "test"}
        config = parse(flat | {f"evaluate.{key.replace('_', '-')}": value for key, value in keys.items()})
        method = strategies.create_method(config.method.name, config.method.params)
        choice = ModelSelection.from_config(config, tasks.task_info(config.task.name).metrics(config.task), method)

        def scored(state, round_):
            self.states.setdefault(
                round_, state_digest(state.tensors)
            ) if name == "whole" and round_ not in self.states else 0
            return {"server": {"loss": scores[round_]}} if round_ >= 0 else {}

        with RunFolder(self.at / name, resume) as folder:
            ours = MethodStrategy(
                method, RunSettings.from_config(config, name, choice), folder=folder, scores=scored, spec=self.task.spec
            )
            grid = LocalGrid(app, SITES, self.at / f"sites-{name}", config.flat())
            ours.start(grid, ArrayRecord(dict(self.task.initial(rng.initial_stream(9, "weights")))), config.run.rounds)
            course = ours.rounds.course
            folder.status(
                "completed", course.done, config.run.rounds, course.stopped(config.run.rounds), **course.about
            )
        return [record.round for record in ours.history]

    def killed(self, where, name, at, **keys) -> None:
        """The process dies before `where.name` for the checkpoint of round `at`; None: at the first call."""
        real = getattr(where, name)

        def dies(*arguments):
            if at in (None, *arguments) or any(isinstance(a, dict) and a.get("round") == at for a in arguments):
                raise Killed
            return real(*arguments)

        with self.patch.context() as patch:
            patch.setattr(where, name, dies)
            with pytest.raises(Killed):
                self.go("broken", **keys)

    def final(self, name) -> str:
        return state_digest(load_state(self.at / name / "final" / "server.safetensors").tensors)

    def status(self, name) -> dict:
        return json.loads((self.at / name / "status.json").read_text())


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    return Runs(monkeypatch, tmp_path)


@pytest.mark.long
def test_final_holds_the_best_round_s_model_and_says_so(runs):
    assert runs.go("whole", select_model="best") == [0, 1, 2, 3, 4, 5]
    assert runs.go("last") == [0, 1, 2, 3, 4, 5]
    assert runs.final("whole") != runs.final("last")
    best_state = load_state(runs.at / "whole" / "best-3.safetensors")
    assert best_state.scalars["loop"]["round"] == 3
    rows = [json.loads(line) for line in (runs.at / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {row["round"]: row["weights"] for row in rows if "weights" in row}[3] == runs.final("whole")
    assert runs.status("whole")["best"] == {"round": 3, "metric": "loss", "value": 0.9, "kept": True, "split": "test"}
    assert runs.status("whole")["final"]["round"] == 3
    assert runs.status("whole")["reason"] == ""
    assert "best" not in runs.status("last")
    assert any(
        "the model is the one from round 4, with the best loss 0.9" in line for line in closing_lines(runs.at / "whole")
    )


def test_no_more_than_three_models_lie_on_the_disk(runs, monkeypatch):
    real, most = checkpoints.keep_best, []

    def looks(folder, best, now):
        real(folder, best, now)
        files = [file.stat() for file in folder.glob("*.safetensors")]
        most.append(len({stat.st_ino for stat in files}))

    monkeypatch.setattr(checkpoints, "keep_best", looks)
    runs.go("whole", select_model="best")
    assert max(most) == 3
    assert [file.name for file in sorted((runs.at / "whole").glob("best-*"))] == ["best-3.safetensors"]


def test_a_file_system_without_links_gets_a_copy(runs, monkeypatch):
    def refuses(new, old):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("pathlib.Path.hardlink_to", refuses)
    runs.go("whole", select_model="best")
    assert load_state(runs.at / "whole" / "best-3.safetensors").scalars["loop"]["round"] == 3
    assert runs.status("whole")["final"]["round"] == 3


DEATHS = [
    *((RunFolder, "checkpoint", at) for at in (1, 3, 4)),
    *((checkpoints, "keep_best", at) for at in (1, 3, 4)),
    (RunFolder, "final", None),
]


@pytest.mark.long
@pytest.mark.parametrize("where,name,at", DEATHS)
def test_a_run_that_dies_and_is_resumed_ends_with_the_same_best_model(runs, where, name, at):
    runs.go("whole", select_model="best")
    runs.killed(where, name, at, select_model="best")
    runs.go("broken", resume=True, select_model="best")
    assert runs.final("broken") == runs.final("whole")
    assert runs.status("broken")["best"] == runs.status("whole")["best"]


@pytest.mark.long
def test_a_damaged_checkpoint_of_the_best_round_is_made_anew_and_not_taken(runs):
    runs.go("whole", select_model="best")
    runs.killed(RunFolder, "checkpoint", 4, select_model="best")
    file = runs.at / "broken" / "checkpoint.safetensors"  # of round 3, and best-3 is the same file
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    assert runs.go("broken", resume=True, select_model="best") == [3, 4, 5]
    assert runs.final("broken") == runs.final("whole")


def test_a_best_model_that_is_gone_or_damaged_ends_the_run_with_words(runs):
    runs.killed(RunFolder, "checkpoint", 3, select_model="best")
    best = runs.at / "broken" / "best-1.safetensors"
    file_content = best.read_bytes()
    best.unlink()
    with pytest.raises(
        StateError, match=r"best-1.*checkpoint is missing; resume with evaluate.select-model = \"last\""
    ):
        runs.go("broken", resume=True, select_model="best")
    best.write_bytes(file_content[:-4] + b"oops")
    scores = [2.0, 1.0, 1.5, 1.9, 1.6, 1.2]
    with pytest.raises(StateError, match=r"best-1.*evaluate.select-model = \"last\""):
        runs.go("broken", resume=True, scores=scores, select_model="best")
    runs.go("broken", resume=True, scores=scores)
    assert "best" not in runs.status("broken")
    assert (runs.at / "broken" / "final" / "server.safetensors").is_file()


@pytest.mark.long
def test_a_run_stops_when_its_patience_is_over_and_says_why(runs):
    assert runs.go("early", patience=2, scores=[2.0, 1.0, 1.5, 1.2, 0.1, 0.1]) == [0, 1, 2, 3]
    status = runs.status("early")
    assert (status["state"], status["round"], status["rounds"]) == ("completed", 3, 6)
    words = (
        "stopped early, after round 4: loss has not improved in 2 evaluations (evaluate.patience); best 1 after round 2"
    )
    assert status["reason"] == words
    assert status["final"] == {"round": 3, "scores": {"server": {"loss": 0.1}}}  # scored once more, as a last round is
    lines = closing_lines(runs.at / "early")
    assert lines[0].startswith("rounds: 4 of 6")
    assert runs.go("both", patience=2, select_model="best", scores=[2.0, 1.0, 1.5, 1.2, 0.1, 0.1]) == [0, 1, 2, 3]
    assert runs.status("both")["final"]["round"] == 1
    assert runs_folder.load_run(runs.at / "both").final == {"loss": 0.1}


def test_a_run_that_stopped_stays_so_when_resumed_and_goes_on_with_more_patience(runs):
    runs.go("early", patience=2, scores=[2.0, 1.0, 1.5, 1.2, 0.1, 0.1])
    assert runs.go("early", resume=True, patience=2) == []
    assert runs.go("early", resume=True, patience=3, scores=[2.0, 1.0, 1.5, 1.2, 0.1, 0.1]) == [4, 5]


def test_least_change_counts_for_patience_and_not_for_the_best(runs):
    scores = [1.0, 0.95, 0.92, 0.85, 0.84, 0.83]
    assert runs.go("small", patience=2, min_delta=0.1, select_model="best", scores=scores) == [0, 1, 2]
    assert runs.status("small")["best"]["round"] == 2


@pytest.mark.long
def test_scores_that_are_not_finite_are_never_the_best(runs):
    runs.go("odd", select_model="best", scores=[math.nan, 5.0, math.inf, -math.inf, math.nan, 6.0])
    assert runs.status("odd")["best"]["round"] == 1
    runs.go("none", select_model="best", scores=[math.nan] * 6)
    assert runs.status("none")["final"]["round"] == 5
    assert not list((runs.at / "none").glob("best-*"))


@pytest.mark.parametrize(
    "keys", [{"metric": "accuracy"}, {"select_model": "last", "patience": 2}, {"eval_examples": 7}]
)
def test_scores_of_two_kinds_are_not_compared_over_a_resume(runs, keys):
    runs.killed(RunFolder, "checkpoint", 2, select_model="best")
    if "metric" in keys:
        runs.patch.setattr(
            tasks,
            "task_info",
            lambda name: type(
                "Info",
                (),
                {"metrics": staticmethod(lambda task: {"loss": TaskMetric("lower"), "accuracy": TaskMetric("higher")})},
            ),
        )
    with pytest.raises(ConfigError, match=r"run.resume: .*evaluate\.(metric|select-model|eval-examples)"):
        runs.go("broken", resume=True, **({"select_model": "best"} | keys))


def test_without_a_folder_nothing_can_be_kept(runs):
    settings = RunSettings(choice=ModelSelection("loss", TaskMetric("lower")))
    with pytest.raises(ConfigError, match=r"evaluate.select-model: \"best\" needs a run folder"):
        MethodStrategy(strategies.create_method("fedavg", ""), settings)
