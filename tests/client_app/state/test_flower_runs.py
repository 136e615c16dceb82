"""A Flower run at a site is one run, whatever name its messages have."""

from __future__ import annotations

import pytest

from fedveil.client_app.state import flower_runs
from fedveil.errors import PolicyError, StateError
from fedveil.records.atomic_files import read_checksummed


def test_a_flower_run_is_bound_to_the_name_of_its_first_instruction(tmp_path):
    flower_runs.check_flower_run(tmp_path, 7, "first")  # nothing is bound by a look
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    for act in (flower_runs.check_flower_run, flower_runs.bind_flower_run):
        with pytest.raises(PolicyError, match="run: this Flower run began with 'first'.*'second'"):
            act(tmp_path, 7, "second")


def test_a_resumed_run_has_another_flower_run_and_the_same_name(tmp_path):
    for flower_run in (7, 2**64 - 1):
        flower_runs.bind_flower_run(tmp_path, flower_run, "first")
    files = {file.name: read_checksummed(file.read_bytes()) for file in (tmp_path / flower_runs.FOLDER).iterdir()}
    assert files == {"7": {"run": "first"}, str(2**64 - 1): {"run": "first"}}


@pytest.mark.parametrize("damage", [b"\xff", b"", b"first", None])
def test_a_file_that_cannot_be_read_is_an_error_in_words(damage, tmp_path):
    flower_runs.bind_flower_run(tmp_path, 7, "first")
    file = tmp_path / flower_runs.FOLDER / "7"
    file.write_bytes(file.read_bytes().replace(b"first", b"forst") if damage is None else damage)
    with pytest.raises(StateError, match="cannot read the name of the run with its checksum.*restore it from a backup"):
        flower_runs.check_flower_run(tmp_path, 7, "first")
