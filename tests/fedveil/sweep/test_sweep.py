"""A sweep runs every cell once, continues after an interruption, and ends with a table and a figure."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.console.terminal import make_console
from fedveil.errors import ConfigError
from fedveil.local import LocalFederation
from fedveil.sweep import Grid, run_sweep
from fedveil.sweep.picture import sweep_svg
from fedveil.sweep.sweep import half_width
from fedveil.sweep.table import sweep_table
from tests.fedveil.local.small_federation import settings, write_federation

GRID = Grid.from_texts(["train.learning-rate=0.01,0.2"], seeds=3)


@pytest.fixture
def place(tmp_path):
    write_federation(tmp_path / "here")
    return tmp_path / "here"


def sites(place: Path) -> dict[str, Path]:
    return {name: place / name for name in ("north", "south")}


def test_every_cell_and_seed_has_a_folder_and_a_row(place, tmp_path):
    said: list[str] = []
    result = run_sweep(settings(place, run__rounds=2), sites(place), GRID, tmp_path / "out", say=said.append)
    assert [(row["train.learning-rate"], row["seed"]) for row in result.rows] == [
        (rate, seed) for rate in (0.01, 0.2) for seed in range(3)
    ]
    assert said[0] == "run 1 of 6: train.learning-rate=0.01, seed 0"
    assert len({row["loss"] for row in result.rows}) == 6
    assert all((Path(row["folder"]) / "final" / "privacy.json").is_file() for row in result.rows)
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"] == result.rows
    losses = [run.scores["loss"] for run in result.runs[:3]]
    cell, scores = result.intervals()[0]
    assert (cell.number, scores["loss"]["n"]) == (1, 3)
    assert scores["loss"]["mean"] == pytest.approx(sum(losses) / 3)
    deviation = math.sqrt(sum((loss - sum(losses) / 3) ** 2 for loss in losses) / 2)
    assert half_width(scores["loss"]) == pytest.approx(4.302653 * deviation / math.sqrt(3))  # Student's t with 2
    assert result.best("loss").values == {"train.learning-rate": 0.2}
    assert result.best("accuracy").values == {"train.learning-rate": 0.2}
    with pytest.raises(ConfigError, match=r"expected one of the runs' metrics with finite values \(accuracy"):
        result.best("bleu")
    picture = sweep_svg(result, "loss")
    assert picture.startswith("<svg")
    assert "0.2" in picture
    console = make_console()
    with console.capture() as shown:
        console.print(sweep_table(result))
    assert "±" in shown.get()


def test_completed_runs_are_not_run_again_and_others_go_on(place, tmp_path):
    made: list[LocalFederation] = []

    def federate(*of):
        local = LocalFederation.from_config(*of)
        made.append(local)
        if len(made) == 2:  # interrupted in its second round
            whole = local.run
            object.__setattr__(local, "run", lambda: whole(_interrupt_after_first))
        return local

    def _interrupt_after_first(now, round_):
        raise KeyboardInterrupt

    config = settings(place, run__rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config, sites(place), GRID, tmp_path / "out", federate=federate)
    said: list[str] = []
    before = len(made)
    result = run_sweep(config, sites(place), GRID, tmp_path / "out", say=said.append, federate=federate)
    assert said[0].endswith("seed 0: already completed")
    assert made[before].config.run.resume
    assert len(made) - before == 5
    whole = run_sweep(config, sites(place), GRID, tmp_path / "other")
    assert [row["loss"] for row in whole.rows] == [row["loss"] for row in result.rows]
    run_sweep(config, sites(place), GRID, tmp_path / "out", federate=federate)
    assert len(made) - before == 5


def test_another_config_is_another_run(place, tmp_path):
    first = run_sweep(settings(place, run__rounds=1), sites(place), Grid({}), tmp_path / "out")
    second = run_sweep(settings(place, run__rounds=2), sites(place), Grid({}), tmp_path / "out")
    third = run_sweep(settings(place, run__rounds=2), {"north": place / "west"}, Grid({}), tmp_path / "out")
    (place / "north" / "train.csv").write_text("0,0,0,0,1\n1,1,1,1,0\n")
    fourth = run_sweep(settings(place, run__rounds=2), sites(place), Grid({}), tmp_path / "out")
    assert len({of.runs[0].folder for of in (first, second, third, fourth)}) == 4


@pytest.mark.parametrize(
    ("keys", "grid", "words"),
    [({"run__name": "mine"}, "train.epochs=1", "run.name: a sweep names its own runs"),
     ({"task__evaluation": ""}, "train.epochs=1", "task.evaluation: a sweep needs test data"),
     ({}, "train.epoch=1", "train.epoch"), ({}, "train.epochs=1,-1", "train.epochs"),
     ({}, "cohort.max-retries=1", "cohort.max-retries: a run in one process supports only 2")],
)  # fmt: skip
def test_a_wrong_config_is_refused_before_the_first_run(place, tmp_path, keys, grid, words):
    with pytest.raises(ConfigError, match=words):
        run_sweep(settings(place, **keys), sites(place), Grid.from_texts([grid]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def arguments(place: Path, out: Path, rounds: int = 2) -> list[str]:
    config = place / "run.toml"
    flat = settings(place, run__rounds=rounds)
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in flat.items()))
    named = [text for name, of in sites(place).items() for text in ("--site", f"{name}={of}")]
    return ["sweep", str(config), *named, "--grid", "train.learning-rate=0.01,0.2", "--seeds", "2", "--out", str(out)]


def test_the_command_ends_with_a_table_and_a_picture(place, tmp_path, capsys):
    assert main(arguments(place, tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert "best mean loss: train.learning-rate=0.2" in shown
    assert 'xmlns="http://www.w3.org/2000/svg"' in (tmp_path / "out" / "sweep.svg").read_text()
    assert main([*arguments(place, tmp_path / "out"), "--sites", "2"]) == 2
    assert "give either --site" in capsys.readouterr().err
    assert main([*arguments(place, tmp_path / "out"), "--site", "north"]) == 2


@pytest.mark.long
def test_ctrl_c_ends_a_sweep_and_the_same_command_goes_on(place, tmp_path):
    """In a process of its own, so that the signal arrives as from a terminal."""
    code = "import sys; from fedveil.console.main import run_command; from fedveil.sweep import command; "
    code += 'sys.exit(run_command("sweep", command))'
    command = [sys.executable, "-c", code, *arguments(place, tmp_path / "out", rounds=2000)[1:]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 240
        while not list((tmp_path / "out").glob("*/metrics.jsonl")) and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run the same command again to resume the sweep" in said
    (folder,) = (path.parent for path in (tmp_path / "out").glob("*/status.json"))
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "interrupted by its user")
