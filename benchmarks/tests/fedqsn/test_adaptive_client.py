"""The gain of a client that waits, colludes and trains."""

from __future__ import annotations

import pytest

from benchmarks.tests.text_folder import settings
from fedveil_bench.fedqsn import adaptive_client
from fedveil_bench.runner import BenchOptions


@pytest.mark.long
def test_waiting_shows_more_and_training_helps(folder):
    methods = {"it": {"name": "fedqsn", "fields": "bits = 4\nserver_rate = 0.2\nclient_rate = 0.3"}}
    rows = adaptive_client.of_seed(settings(methods, data="e2e_nlg"), 0, BenchOptions(device="cpu"))
    seen = {n: rows[f"it, {n}"]["visible"] for n in ("received", "averaged", "colluding")}
    assert seen["received"] < seen["averaged"] < seen["colluding"] <= 0.9
    assert len(rows["it, received"]["loss"]) == len(rows["public base"]["loss"]) == 2
    last = {n: row["loss"][-1][0] for n, row in rows.items()}
    for name in ("it, received, filled", "it, averaged, filled", "it, colluding, filled", "public base"):
        assert last[f"{name}, fine-tuned"] < last[name], name
    assert last["it, averaged, filled"] != last["it, averaged"]
