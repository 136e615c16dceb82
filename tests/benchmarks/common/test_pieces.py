"""Cases are measured once, whatever comes between."""

from __future__ import annotations

from fedveil.benchmarks.common import pieces
from fedveil.benchmarks.run import commit


def test_a_case_is_measured_once_and_keeps_its_commit(tmp_path):
    file, asked = tmp_path / "x.pieces.jsonl", []

    def measure(value: int) -> dict[str, int]:
        asked.append(value)
        return {"value": value}

    first = pieces.row(file, "a", lambda: measure(1))
    assert first == {"name": "a", "commit": commit(), "value": 1}
    assert pieces.row(file, "b", lambda: measure(2))["value"] == 2
    assert pieces.row(file, "a", lambda: measure(3)) == first
    assert asked == [1, 2]


def test_without_a_file_all_is_measured(tmp_path):
    assert [pieces.row(None, "a", lambda i=i: {"value": i})["value"] for i in range(2)] == [0, 1]
    assert list(tmp_path.iterdir()) == []
