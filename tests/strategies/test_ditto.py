"""Ditto compared with a reference that runs both trainings of every client in plain Python."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.layout import Payload
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.ditto import Ditto
from fedveil.strategies.fedavg import FedAvg
from tests.strategies.quadratics import CTX, Quadratic, federation, quadratic_twin


def test_three_rounds_of_three_clients_equal_the_twin():
    """F_k(w) = 1/2 (w - c_k)^2, two steps of SGD at rate 0.25, lambda = 0.5."""
    centers, counts = {"a": 1.0, "b": -2.0, "c": 4.0}, {"a": 1, "b": 2, "c": 3}
    run = federation(Ditto(0.5), "ditto", centers, counts)
    w, own = 0.5, dict.fromkeys(centers)
    for round_ in range(3):
        run.round(round_)
        sent = {}
        for site, c in centers.items():
            v = w if own[site] is None else own[site]
            own[site] = quadratic_twin(v, lambda v, c=c, w=w: v - c + 0.5 * (v - w))
            sent[site] = quadratic_twin(w, lambda x, c=c: x - c)
        w = sum(counts[s] * sent[s] for s in centers) / 6
        assert run.models()["server"]["w"].tolist() == pytest.approx([w] * 2, rel=1e-5)
        for site in centers:
            assert run.models(site)["client"]["w"].tolist() == pytest.approx([own[site]] * 2, rel=1e-5)


def test_the_server_sees_what_it_sees_under_fedavg(lora_spec, lora_weights):
    uploads = []
    for method in (Ditto(3.0), FedAvg()):
        exchange = MessageExchange(method, "same", lora_spec)
        server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
        down = exchange.broadcast(server, CTX)
        trainer = Quadratic(lora_spec, 7.0, 3)
        _, parts = exchange.participate(down, None, trainer, CTX)
        uploads.append((down, b"".join(parts)))
    assert uploads[0] == uploads[1]


def test_without_a_pull_a_client_trains_alone():
    spec = {"w": ParamSpec((2,))}
    trainer = Quadratic(spec, 4.0, 1)
    state, _ = Ditto(0.0).client(None, Payload({"w": torch.zeros(2)}), trainer, CTX)
    again, _ = Ditto(0.0).client(state, Payload({"w": torch.full((2,), 100.0)}), trainer, CTX)
    assert again.tensors["w"].tolist() == pytest.approx([4 * (1 - 0.75**4)] * 2)


@pytest.mark.parametrize("fields", ["strength = -1.0", "strength = inf", "upload_bits = 1"])
def test_bad_fields_are_refused(fields):
    with pytest.raises(ConfigError, match=r"strength|bits"):
        strategies.create_method("ditto", fields)
