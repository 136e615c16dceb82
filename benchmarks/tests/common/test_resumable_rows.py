"""Each case is measured only once, whatever interrupts the benchmark."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from fedveil_bench.common import resumable_rows
from fedveil_bench.provenance import measured_commit

OTHER = (
    "from fedveil_bench.common import resumable_rows; from pathlib import Path; import sys; file = Path(sys.argv[1])\n"
)


def said(code: str, *args: object) -> str:
    """What another process prints: POSIX locks are of a process."""
    command = [sys.executable, "-c", OTHER + code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_case_is_measured_once_and_keeps_its_commit(tmp_path):
    file, asked = tmp_path / "x.pieces.jsonl", []

    def measure(value: int) -> dict[str, int]:
        asked.append(value)
        return {"value": value}

    first = resumable_rows.measure_row(file, "a", lambda: measure(1))
    assert first == {"name": "a", "commit": measured_commit(), "value": 1}
    assert resumable_rows.measure_row(file, "b", lambda: measure(2))["value"] == 2
    assert resumable_rows.measure_row(file, "a", lambda: measure(3)) == first
    assert asked == [1, 2]


def test_without_a_file_all_is_measured(tmp_path):
    assert [resumable_rows.measure_row(None, "a", lambda i=i: {"value": i})["value"] for i in range(2)] == [0, 1]
    assert [row["value"] for row in resumable_rows.measure_rows(None, {n: partial(dict, value=n) for n in "ab"})] == [
        "a",
        "b",
    ]
    assert list(tmp_path.iterdir()) == []


def test_two_processes_are_never_at_the_same_piece(tmp_path):
    file, code = (
        tmp_path / "new" / "x.pieces.jsonl",
        "with resumable_rows.lock_piece(file, int(sys.argv[2])) as mine: print(mine)",
    )
    with resumable_rows.lock_piece(file, 7) as mine:
        assert mine
        assert (said(code, file, 7), said(code, file, 8)) == ("False\n", "True\n")
    assert said(code, file, 7) == "True\n"


def test_of_rows_each_process_takes_what_no_other_is_at_or_has_measured(tmp_path):
    """The other process comes while this one is at "b", finds "a", and measures "c"."""
    file = tmp_path / "x.pieces.jsonl"
    code = "print([r['by'] for r in resumable_rows.measure_rows(file, {n: lambda: {'by': 'other'} for n in 'abc'})])"
    heard = []

    def measure(name: str) -> dict[str, str]:
        if name == "b":
            heard.append(said(code, file))
        return {"by": "this"}

    found = resumable_rows.measure_rows(file, {name: partial(measure, name) for name in "abc"})
    assert heard == ["['this', 'other']\n"]
    assert [(row["name"], row["by"]) for row in found] == [("a", "this"), ("b", "this"), ("c", "other")]
    assert [row["name"] for row in resumable_rows.read_pieces(file)] == ["a", "c", "b"]


def test_after_its_minutes_no_further_piece_is_begun_and_what_was_kept_is_there(tmp_path, monkeypatch):
    file, now = tmp_path / "x.pieces.jsonl", [0.0]
    monkeypatch.setattr(resumable_rows.time, "monotonic", lambda: now[0])

    def measure(value: int) -> dict[str, int]:
        now[0] += 60.0
        return {"value": value}

    asked = {name: partial(measure, i) for i, name in enumerate("abcd")}
    resumable_rows.measure_row(file, "d", asked["d"])
    assert [row["name"] for row in resumable_rows.measure_rows(file, asked, 1.5)] == ["a", "b", "d"]
    assert [row["name"] for row in resumable_rows.measure_rows(file, asked, 0)] == ["a", "b", "d"]
    assert [row["name"] for row in resumable_rows.measure_rows(file, asked)] == ["a", "b", "c", "d"]
