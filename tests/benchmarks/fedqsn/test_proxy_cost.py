"""What a proxy costs: its rows, and its bytes beside the count by hand."""

from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.benchmarks.fedqsn import proxy_cost
from fedveil.benchmarks.run import Options, Outcome
from fedveil.strategies.fedqsn import FedQSN


def test_speed_and_exact_bytes(monkeypatch):
    """The packed message beside the count by hand, for a GPT-2 so wide that headers do not matter."""
    asked = {
        "threads": [1], "now": 1, "repeats": 2, "fields": "bits = 2",
        "model": {"n_layer": 2, "n_embd": 256, "n_head": 2, "vocab_size": 3000, "n_positions": 16},
    }  # fmt: skip
    found = proxy_cost.of_seed(asked, 0, Options(device="cpu"))
    assert set(found["rows"]) == {"1 threads", "1 threads, clone"}
    sizes = found["bytes"]
    assert sizes["download_bytes"] == pytest.approx(sizes["counted_bytes"], rel=0.02)
    spec = proxy_cost.spec_of_gpt2(asked["model"])
    assert sizes["fedavg_bytes"] == 4 * sum(torch.Size(t.shape).numel() for t in spec.values())
    method = strategies.create("fedqsn", "bits = 2")
    assert isinstance(method, FedQSN)
    everything = proxy_cost.counted(method, spec, {})
    assert everything > sizes["counted_bytes"]
    monkeypatch.setattr(proxy_cost.seeds, "run", lambda *_: [found])
    outcome: Outcome = proxy_cost.run(asked, Options())
    assert "within 2 %: held" in outcome.verdicts[-1]
