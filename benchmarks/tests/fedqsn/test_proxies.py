"""The server's models and the clients' proxies, on a small generated data folder."""

from __future__ import annotations

import pytest

from benchmarks.tests.text_folder import settings
from fedveil_bench.fedqsn import proxies
from fedveil_bench.runner import BenchOptions


@pytest.mark.long
def test_models_proxies_and_gaps(folder):
    methods = {
        "FedAvg": {"name": "fedavg", "fields": "adapter = {kind = 'all'}"},
        "open": {"name": "fedqsn", "fields": "server_rate = 0.0\nclient_rate = 0.0\nquantiser = 'none'"},
        "FedQSN": {"name": "fedqsn", "fields": "bits = 1"},
        "FedSP": {"name": "fedsp", "fields": "distil_steps = 1\nadapter = {kind = 'prefix', length = 2, cells = 1}"},
        "FedLPP": {"name": "fedlpp"},
    }
    rows = proxies.of_seed(settings(methods, similarity=True), 0, BenchOptions(device="cpu"))
    loss = {name: row["figures"]["e2e_nlg loss"][0] for name, row in rows.items() if "e2e_nlg loss" in row["figures"]}
    for kind in ("global", "proxy", "tuned", "gap", "tuned gap"):  # FedQSN that hides nothing is FedAvg, the control
        assert loss[f"open {kind}"] == pytest.approx(loss[f"FedAvg {kind}"], rel=1e-6)
    assert loss["FedAvg tuned gap"] != 0
    assert loss["FedQSN gap"] == pytest.approx(loss["FedQSN proxy"] - loss["FedQSN global"])
    assert abs(loss["FedQSN gap"]) > 0.01
    assert {"FedSP global", "FedSP tuned gap", "public base", "public base, fine-tuned"} <= set(loss)
    alike = {
        n: {m.removeprefix("e2e_nlg "): f[0] for m, f in r["figures"].items()} for n, r in rows.items() if "simil" in n
    }
    assert alike["open similarity"]["whole"] == pytest.approx(1.0)
    assert alike["FedQSN similarity"]["whole"] < alike["FedQSN similarity"]["visible"] < 0.95
    assert alike["FedLPP similarity"]["whole"] > 0.99
    assert abs(alike["FedQSN similarity"]["whole of the difference to the base"]) < 0.5
    assert rows["FedAvg global"]["download_bytes"] > 3 * rows["FedQSN global"]["download_bytes"]


@pytest.mark.long
def test_noise_goes_with_a_method_as_it_is(folder):
    noisy = {
        "dp.clip-norm": 1.0,
        "dp.noise-multiplier": 1.0,
        "dp.learning-rate": 0.001,
        "dp.adjacency": "zero-out",
    }
    methods = {"it": {"name": "fedqsn", "fields": "bits = 4", "config": noisy}}
    rows = proxies.of_seed(settings(methods), 0, BenchOptions(device="cpu"))
    assert rows["it tuned"]["figures"]["e2e_nlg loss"][0] > 0
    assert rows["it global"]["figures"]["e2e_nlg epsilon at delta 1e-05 (zero-out), were its noise not seeded"][
        0
    ] == pytest.approx(6.573, abs=0.01)
