"""The loss hook: a method in one file (FedProx) adds a term to the loss of every local step."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng, tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.federation.exchange import MessageExchange
from fedveil.rng import RandomStream
from fedveil.strategies.fedprox import FedProx
from tests.conftest import ROOT

KEY = bytes(range(32))
MU = 0.7


def by_hand(task, rows, start: Weights, batches: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """AdamW on the loss over all batches of a step, and the proximal term once a step."""
    task.put(start)
    optimiser = torch.optim.AdamW(list(task.trained.values()), lr=1e-2, weight_decay=1e-6)
    for step in batches:
        collated = [task.collate([rows[i] for i in batch]) for batch in step]
        loss = sum(task.loss_sum(batch) for batch in collated) / sum(batch.terms for batch in collated)
        loss = loss + MU / 2 * sum((p - start[n]).square().sum() for n, p in task.trained.items())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {n: p.detach().clone() for n, p in task.trained.items()}


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fedprox_in_one_file_is_its_formula(accumulate):
    flat = {
        "train.batch-size": 4,
        "train.gradient-accumulation-steps": accumulate,
        "train.learning-rate": 1e-2,
        "run.deterministic": True,
    }
    task = tasks.load_task(parse(flat), LoraAdapter(2), "cpu")
    rows = task.encode(task.examples(ROOT / "data" / "e2e", "train")[:12])
    generator = torch.Generator().manual_seed(1)
    start = {n: 0.05 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}
    exchange = MessageExchange(FedProx(MU), "fedprox", task.spec)
    ctx = RoundContext(0, "a", True, KEY)
    server = exchange.method.init(task.spec, start, rng.initial_stream(0, "m"))
    _, parts = exchange.participate(exchange.broadcast(server, ctx), None, task.trainer(rows, RandomStream(KEY)), ctx)
    sent = exchange.receive(b"".join(parts), 0).payload.fields

    order = torch.randperm(12, generator=RandomStream(KEY).torch_generator()).tolist()
    batches = [order[i : i + 4] for i in range(0, 12, 4)]
    steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    expected = by_hand(task, rows, start, steps)
    plain = task.trainer(rows, RandomStream(KEY)).train(start).weights
    for name in task.spec:
        torch.testing.assert_close(sent[name], expected[name], rtol=1e-5, atol=1e-6)
    assert max(float((sent[n] - plain[n]).abs().max()) for n in task.spec) > 1e-3  # the term was there
