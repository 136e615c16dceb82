"""The preset's runner: with the table, every entry has enough sites; if sites draw, some do not; bytes are counted."""

from __future__ import annotations

import pytest

from fedveil_bench import runner
from fedveil_bench.runner import BenchOptions
from fedveil_bench.secagg import entries

SETTINGS = runner.read_preset("secure/entries", "full")["settings"]
SMALL = SETTINGS | {"seeds": 1, "sites": [3], "rows": 4, "test": 2}
SMALL["config"] = SETTINGS["config"] | {"run.rounds": 2, "train.max-steps": 1, "train.batch-size": 2}


@pytest.mark.long
def test_the_table_leaves_no_entry_to_too_few_sites_and_its_bytes_are_counted():
    done = entries.run_benchmark(SMALL, BenchOptions())
    rows = {row["name"]: {name: one["mean"] for name, one in row["metrics"].items()} for row in done.rows}
    assert list(rows) == [
        f"{method}, 3 sites, {who}" for method in ("fedrand", "fedqsn") for who in ("sites draw", "table")
    ]
    for method in ("fedrand", "fedqsn"):
        own, planned = rows[f"{method}, 3 sites, sites draw"], rows[f"{method}, 3 sites, table"]
        assert own["exposed"] > 0.05
        assert planned["exposed"] == own["table_bytes"] == 0
        assert planned["table_bytes"] > 100
        assert planned["vector_bytes"] == own["vector_bytes"] > 1000
        assert planned["loss"] > 0
        assert planned["broadcast_bytes"] > 1000
    assert len(done.verdicts) == 2
    assert "0.0% of the entries may be of too few sites instead of" in done.verdicts[0]


def test_the_cost_of_a_table_is_its_difference_seed_by_seed():
    own = [{"loss": 2.0 + i, "exposed": 0.5, "broadcast_bytes": 100.0, "table_bytes": 0.0} for i in range(3)]
    planned = [
        of | {"loss": of["loss"] + 0.25, "exposed": 0.0, "broadcast_bytes": 90.0, "table_bytes": 7.0} for of in own
    ]
    words = entries.describe_cost("fedrand", 3, own, planned)
    assert "0.0% of the entries may be of too few sites instead of 50.0%" in words
    assert "the loss changes by +0.250 [+0.250, +0.250]" in words
    assert "a broadcast by -10 bytes of 100; the table has 7 bytes." in words
