"""Mutated data files give rows, or one error that names the file but no row value; see tools/fuzz_data.py."""

from __future__ import annotations

import pytest

from tools import fuzz_data


@pytest.mark.parametrize("kind", fuzz_data.KINDS)
def test_a_few_of_each_kind(tmp_path, kind):
    start = fuzz_data.KINDS.index(kind)
    cases = [fuzz_data.make_case(5, start + len(fuzz_data.KINDS) * i) for i in range(8)]
    verdicts = [fuzz_data.judge_case(kind, content, tmp_path) for _, content in cases]
    assert set(verdicts) <= {"rows", "refused"}


@pytest.mark.slow
def test_many_in_a_process_of_their_own():
    counts, wrong = fuzz_data.search(11, 0, 22_000)
    assert wrong == []
    assert sum(counts.values()) == 22_000


def test_a_wrong_reading_is_seen(tmp_path, monkeypatch):
    """The controls: an exception of another kind, an error without the file, one with a value, one that is silent."""
    from fedveil.errors import TaskError

    def fails(error):
        def read(folder):
            raise error

        monkeypatch.setattr(fuzz_data, "_read", read)
        return fuzz_data.judge_case("csv", b"", tmp_path)

    assert fails(ValueError("x")).startswith("ValueError: x")
    assert fails(TaskError("task.data: lost")).startswith("no file")
    assert fails(TaskError(f"task.data: {tmp_path}: {fuzz_data.MARK}")).startswith("a value")
    assert fails(TaskError(f"task.data: {tmp_path}" + "x" * 9000)).startswith("a message of")
    assert fails(TaskError(f"task.data: {tmp_path}: lost")) == "refused"
