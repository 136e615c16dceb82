"""pfl-research's simulator: both get the same work, and missing parts are reported."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.tests.random_binary.noise import VIT, write
from fedveil.errors import ConfigError
from fedveil_bench import runner as presets
from fedveil_bench.peers import environments, simulated
from fedveil_bench.runner import BenchOptions

SETTINGS = presets.read_preset("peers/simulated", "quick")["settings"] | {
    "data": "noise", "sites": 3, "rows_a_site": 4, "rounds": 2, "test_rows": 8, "seeds": 1,
}  # fmt: skip
SETTINGS["model"], SETTINGS["classes"] = VIT, 3
SETTINGS["config"] = SETTINGS["config"] | {"train.batch-size": 2}
GOOD = {"loss": 1.0, "right": 50.0, "s a round": 2.0, "sites a second": 25.0}
COPY = """
import json, shutil, sys
from pathlib import Path
folder = Path(sys.argv[2])
shutil.copy(folder / "initial.safetensors", folder / "weights.safetensors")
(folder / "noted.json").write_text(json.dumps({"seconds": [1.0] * ROUNDS}))
"""


@pytest.fixture
def noise(tmp_path, monkeypatch):
    """$FEDVEIL_DATA with pictures of noise."""
    write(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))


@pytest.fixture
def work(noise, tmp_path):
    """A seed's work on pictures of noise."""
    return simulated.SimulatedWork(SETTINGS, 0, BenchOptions(device="cpu"), tmp_path / "work")


def pretend_python(folder, script):
    """An "environment" whose Python runs `script` whatever it is asked to run."""
    (folder / "script.py").write_text(script)
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "script.py"} "$@"\n')
    program.chmod(0o755)
    return program


def test_sites_share_no_row_and_ours_trains_from_the_common_start(work):
    assert [len(rows) for rows in work._sites.values()] == [4, 4, 4]
    assert len({id(row) for rows in work._sites.values() for row in rows}) == 12
    weights, seconds = work.ours()
    assert len(seconds) == 2
    assert weights.keys() == work.initial.keys()
    assert any(not torch.equal(weights[name], work.initial[name]) for name in weights)
    assert work.scores(weights, [9.0, 2.0])["sites a second"] == 1.5  # the first round is not timed
    assert work.scores(weights).keys() == {"loss", "right"}


def test_the_peer_gets_the_same_rows_weights_and_settings(work, tmp_path):
    weights, seconds = work.peer(pretend_python(tmp_path, COPY.replace("ROUNDS", "2")))
    assert seconds == [1.0, 1.0]
    assert all(torch.equal(weights[name], work.initial[name]) for name in weights)
    rows, task = (
        load_file(tmp_path / "work" / "rows.safetensors"),
        json.loads((tmp_path / "work/task.json").read_text()),
    )
    assert rows["site"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for i, (pixels, label) in enumerate(zip(rows["pixels"], rows["labels"], strict=True)):
        row = work._sites[f"site-{i // 4}"][i % 4]
        assert torch.equal(pixels, row.pixels())
        assert label == row.label
    config = work._config.train
    assert (task["batch_size"], task["learning_rate"], task["weight_decay"], task["epochs"], task["sites"]) == (
        config.batch_size, config.learning_rate, config.weight_decay, config.epochs, 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit('no pfl here')", "exit status 1: no pfl here"),
        (COPY.replace("ROUNDS", "5"), "after 2 rounds, found .* after 5"),
    ],
)
def test_a_peer_that_fails_or_does_other_work_makes_no_row(script, why, work, tmp_path):
    with pytest.raises(ConfigError, match=why):
        work.peer(pretend_python(tmp_path, script))


def test_a_peer_that_does_not_end_is_said(work, tmp_path, monkeypatch):
    monkeypatch.setattr(simulated, "_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match="did not end within 0.2 s"):
        work.peer(pretend_python(tmp_path, "import time; time.sleep(60)"))


def test_the_sites_may_not_have_more_rows_than_there_are(noise, tmp_path):
    with pytest.raises(ConfigError, match="expected 300000 rows, found"):
        simulated.SimulatedWork(SETTINGS | {"rows_a_site": 100_000}, 0, BenchOptions(device="cpu"), tmp_path / "work")


def test_of_a_peer_that_is_left_out_nothing_is_claimed():
    ours = {simulated.BEFORE: [{"loss": 2.3, "right": 10.0}] * 3, simulated.OURS: [GOOD] * 3}
    said = simulated.build_outcome(ours, SETTINGS, "pfl-research is left out: x").verdicts
    assert said[0] == "pfl-research is left out: x."
    assert not any("the claim" in sentence for sentence in said)


@pytest.mark.parametrize(("ours", "word"), [(1.0, "holds here"), (4.0, "does not hold here")])
def test_who_is_faster_is_decided_by_the_seeds(ours, word):
    wiggle = [0.0, 0.01, 0.02, 0.03, 0.04]
    done = {
        simulated.BEFORE: [{"loss": 2.3, "right": 10.0}] * 5,
        simulated.PEER.name: [GOOD | {"s a round": 2.0 + w, "loss": 1.0 + w} for w in wiggle],
        simulated.OURS: [GOOD | {"s a round": ours + w, "loss": 1.0 + w} for w in wiggle],
    }
    said = simulated.build_outcome(done, SETTINGS).verdicts
    assert next(s for s in said if s.startswith("s a round of FedVeil")).endswith(f"the claim has it lower: {word}.")
    assert next(s for s in said if s.startswith("loss of FedVeil")).endswith("holds here.")


@pytest.mark.slow
def test_pfl_research_itself_learns_as_much(noise):
    environment = environments.find_environment(simulated.PEER, os.environ)
    if environment.python is None:
        pytest.skip(environment.said)
    found = simulated.run_benchmark(SETTINGS | {"rounds": 4}, BenchOptions(device="cpu"))
    rows = {row["name"]: row["metrics"]["loss"]["mean"] for row in found.rows}
    assert rows[simulated.PEER.name] < rows[simulated.BEFORE]
    assert rows[simulated.PEER.name] == pytest.approx(rows[simulated.OURS], abs=0.1)
