"""A Flower run at a site is one run, whatever name its messages have."""

from __future__ import annotations

import pytest

from fedveil.client_app.state import flower_runs
from fedveil.errors import PolicyError, StateError


def test_a_flower_run_is_bound_to_the_name_of_its_first_instruction(tmp_path):
    flower_runs.check_flower_run(tmp_path, 7, "first")  # nothing is bound by a look
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    for act in (flower_runs.check_flower_run, flower_runs.bind_flower_run):
        with pytest.raises(PolicyError, match="run: expected 'first', which this Flower run began with.*'second'"):
            act(tmp_path, 7, "second")


def test_a_resumed_run_has_another_flower_run_and_the_same_name(tmp_path):
    for flower_run in (7, 2**64 - 1):
        flower_runs.bind_flower_run(tmp_path, flower_run, "first")
    bound = {file.name: file.read_text() for file in (tmp_path / flower_runs.FOLDER).iterdir()}
    assert bound == {"7": "first", str(2**64 - 1): "first"}


def test_a_file_that_cannot_be_read_is_an_error_in_words(tmp_path):
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    (tmp_path / flower_runs.FOLDER / "7").write_bytes(b"\xff")
    with pytest.raises(StateError, match="expected the name of a run, found UnicodeDecodeError; remove it"):
        flower_runs.check_flower_run(tmp_path, 7, "first")
