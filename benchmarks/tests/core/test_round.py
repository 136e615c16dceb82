"""The table of rounds without training, compared with values by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedveil.attacks.statistics import confidence_interval
from fedveil_bench.core import round as rounds
from fedveil_bench.process_monitor.no_op import NoOpRun, held_to


def way(seconds, cpu):
    return NoOpRun(list(seconds), list(cpu), SimpleNamespace(), 200_000)


OURS = way(
    [1.5, 1.7, 1.6],
    [
        {"SuperNode": 0.125, "client process": 0.25, "worker": 3.0},
        {"SuperNode": 0.125, "client process": 0.5, "worker": 3.0},
        {"SuperNode": 0.125, "client process": 0.375, "resident": 0.125},
    ],
)
STOCK = way([6.0, 6.5, 7.0], [{"SuperNode": 0.5, "client process": 1.25}])


def test_a_site_s_cpu_is_that_of_its_processes_without_the_worker():
    assert rounds.beside_worker(OURS) == [0.375, 0.625, 0.625]


def test_a_table_has_both_ways_by_number_of_sites_and_says_what_was_asked():
    pairs = {2: rounds.PairedRound(OURS, STOCK, 200_500, 500), 3: rounds.PairedRound(OURS, STOCK, 200_400, 400)}
    found = rounds.build_outcome(pairs, {2: 2.0}, 0.4)
    assert [row["name"] for row in found.rows] == [
        "fedveil, 2 sites", "flower, 2 sites", "fedveil, 3 sites", "flower, 3 sites",
    ]  # fmt: skip
    metrics = found.rows[0]["metrics"]
    assert metrics["cpu_seconds_beside_worker"]["mean"] == pytest.approx(1.625 / 3)
    assert metrics["CPU s resident"]["mean"] == pytest.approx(0.125 / 3)
    assert metrics["CPU s worker"]["mean"] == 2.0
    assert (found.rows[0]["upload_bytes"], found.rows[2]["upload_bytes"]) == (200_500, 200_400)
    seconds, cpu, beyond, other, *_ = found.verdicts
    assert seconds == (
        "2 sites: a round that trains nothing takes 1.60 s (asked: at most 2 s: holds here), stock Flower's with the "
        "same 200000 bytes 6.50 s."
    )
    assert "need 0.54 CPU-seconds a round (asked: at most 0.4: not decided), stock Flower's 1.75." in cpu
    assert beyond.endswith("at most 500 bytes beyond its payload: 0.250% (asked: below 1 % at 1 MB).")
    assert other.startswith("3 sites: a round that trains nothing takes 1.60 s, stock")


@pytest.mark.parametrize(
    "values, word",
    [
        ([1.0, 1.1, 1.2], "holds here"),
        ([2.0, 2.1, 2.2], "does not hold here"),
        ([1.0, 2.0], "not decided"),
        ([1.0], "not decided"),
        ([9.0], "not decided"),
    ],
)
def test_a_bound_is_held_where_the_whole_interval_is_within(values, word):
    assert held_to(confidence_interval(values), 1.5) == word
