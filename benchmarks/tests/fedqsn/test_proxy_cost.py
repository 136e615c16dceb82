"""The cost of a proxy: the result's rows, and its bytes compared with a count by hand."""

from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.strategies.fedqsn import FedQSN
from fedveil_bench.fedqsn import proxy_cost
from fedveil_bench.runner import BenchOptions, BenchOutcome


def test_speed_and_exact_bytes(monkeypatch):
    """The packed message beside the count by hand, for a GPT-2 so wide that headers do not matter."""
    asked = {
        "threads": [1], "now": 1, "repeats": 2, "fields": "bits = 2",
        "model": {"n_layer": 2, "n_embd": 256, "n_head": 2, "vocab_size": 3000, "n_positions": 16},
    }  # fmt: skip
    found = proxy_cost.of_seed(asked, 0, BenchOptions(device="cpu"))
    assert set(found["rows"]) == {"1 threads", "1 threads, clone"}
    sizes = found["bytes"]
    assert sizes["download_bytes"] == pytest.approx(sizes["counted_bytes"], rel=0.02)
    spec = proxy_cost.spec_of_gpt2(asked["model"])
    assert sizes["fedavg_bytes"] == 4 * sum(torch.Size(t.shape).numel() for t in spec.values())
    method = strategies.create_method("fedqsn", "bits = 2")
    assert isinstance(method, FedQSN)
    everything = proxy_cost.count_bytes(method, spec, {})
    assert everything > sizes["counted_bytes"]
    monkeypatch.setattr(proxy_cost.seeds, "run_seeds", lambda *_: [found])
    outcome: BenchOutcome = proxy_cost.run_benchmark(asked, BenchOptions())
    assert "within 2 %: held" in outcome.verdicts[-1]


LARGE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


def test_a_large_model_is_measured_beside_a_clone():
    """On the CPU here, where no layer is left out."""
    asked = {"now": "large", "repeats": 2, "fields": "bits = 2", "large": LARGE}
    found = proxy_cost.of_seed(asked, 0, BenchOptions(device="cpu"))
    assert set(found["rows"]) == {"large", "large, message", "large, clone"}
    assert {len(v) for row in found["rows"].values() for v in row.values()} == {2}
    assert found["rows"]["large, clone"]["copies"] == [1.0, 1.0]
    assert found["layers"] == 2
    entries = sum(torch.Size(t.shape).numel() for t in proxy_cost.spec_of_llama(LARGE).values())
    assert found["billions"] == pytest.approx(entries / 1e9)


@pytest.mark.parametrize("copies,verdict", [(4.9, "held"), (5.1, "NOT HELD")])
def test_the_bound_of_a_large_model_is_five_copies(monkeypatch, copies, verdict):
    rows = {n: {"copies": [c]} for n, c in (("large", copies), ("large, message", 9.0), ("large, clone", 1.0))}
    small = {"rows": {"1 threads": {"GB/s": [1.0]}, "1 threads, clone": {"GB/s": [2.0]}}}
    small["bytes"] = {"download_bytes": 100, "counted_bytes": 100, "fedavg_bytes": 500}
    answers = iter([small, {"rows": rows, "layers": 32, "billions": 8.03}, small])
    monkeypatch.setattr(proxy_cost.seeds, "run_seeds", lambda *_: [next(answers)])
    settings = {"threads": [1], "repeats": 1}
    said = proxy_cost.run_benchmark(settings, BenchOptions(device="cuda")).verdicts
    assert f"in {copies:.2f} copies (median of 1; asked: at most 5: {verdict}), with the message" in said[1]
    assert len(proxy_cost.run_benchmark(settings, BenchOptions(device="cpu")).verdicts) == 2
