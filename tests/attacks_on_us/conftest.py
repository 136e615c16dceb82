"""A sound upload of FedAvg, which the attacks change. A file says in SPEC and CTX what it is of, and whose."""

from __future__ import annotations

import pytest

from fedveil import rng, strategies
from fedveil.federation.exchange import MessageExchange
from tests.conftest import ToyTrainer


@pytest.fixture
def exchange(request) -> MessageExchange:
    return MessageExchange(strategies.create_method("fedavg"), "fedavg", request.module.SPEC)


@pytest.fixture
def upload(exchange, random_weights, request) -> bytes:
    spec, ctx = exchange.spec, request.module.CTX
    server = exchange.method.init(spec, random_weights(spec, 1), rng.initial_stream(1, "method init"))
    _, parts = exchange.participate(exchange.broadcast(server, ctx), None, ToyTrainer(spec), ctx)
    return b"".join(parts)
