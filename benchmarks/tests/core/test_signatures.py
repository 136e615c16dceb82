"""The table of signed and unsigned rounds, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedveil_bench.core import signatures
from fedveil_bench.process_monitor.no_op import NoOpRun


def way(*seconds, cpu=1.0):
    return NoOpRun(list(seconds), [{"SuperNode": 0.5, "worker": cpu}], SimpleNamespace(), 200_000)


def test_pairs_of_runs_give_a_ratio_and_all_rounds_a_row():
    runs = {"unsigned": [way(1.0, 9.0, 2.0), way(2.0, 4.0)], "signed": [way(2.0, 2.5, 2.2), way(3.0, 3.6)]}
    outcome = signatures.build_outcome(runs, 1.2)
    assert [(row["name"], row["rounds"]) for row in outcome.rows[:2]] == [("unsigned", 5), ("signed", 5)]
    assert outcome.rows[0]["metrics"]["seconds_a_round"]["mean"] == pytest.approx(3.6)
    assert outcome.rows[1]["metrics"]["cpu_seconds_a_round"]["mean"] == 1.5
    text, _ = outcome.verdicts
    assert "messages of 200000 bytes, takes 1.100 times as long" in text
    assert "medians 2.50 s and 2.00 s" in text


@pytest.mark.parametrize(
    ("signed", "word"), [((1.01, 1.01), "holds here"), ((1.3, 1.31), "does not hold here"), ((1.0, 1.4), "not decided")]
)
def test_the_bound_is_held_where_the_whole_interval_is_within(signed, word):
    runs = {"unsigned": [way(1.0), way(1.0)], "signed": [way(s) for s in signed]}
    assert f"at most 1.1: {word}" in signatures.build_outcome(runs, 1.1).verdicts[0]


def test_cpu_seconds_are_compared_by_pairs_too():
    runs = {"unsigned": [way(1.0), way(1.0, cpu=3.5)], "signed": [way(1.0, cpu=1.15), way(1.0, cpu=3.9)]}
    outcome = signatures.build_outcome(runs, 1.2)  # of sums 1.5 and 4.0; 1.65 and 4.4
    assert outcome.rows[2]["name"] == signatures.RATIO
    assert outcome.rows[2]["metrics"]["cpu_seconds_a_round"]["mean"] == pytest.approx(1.1)
    assert (
        "1.100 times the CPU seconds of all processes (1.100 to 1.100; asked: at most 1.2: holds here"
        in (outcome.verdicts[1])
    )
