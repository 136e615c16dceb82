from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.lora_algebra import aggregation_gap, factor_product
from fedveil.strategies.ffa_lora import FFALoRA
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32))


def turn(method, server, spec, step=0.5, ctx=CTX):
    """The bytes of one participation, the upload as the server reads it, and the trainer."""
    exchange, local = MessageExchange(method, "ffa_lora", spec), ToyTrainer(spec, step=step)
    private, parts = exchange.participate(exchange.broadcast(server, ctx), None, local, ctx)
    assert private is None
    return b"".join(parts), exchange.receive(b"".join(parts), ctx.round).payload, local


def test_mean_by_hand():
    """B: (3 * 1 + 1 * 5) / 4 = 2; A stays, and with it the mean of the products is B A."""
    server = FederatedState({"m.lora_A": torch.tensor([[2.0, -1.0]]), "m.lora_B": torch.zeros(1, 1)})
    uploads = [AcceptedUpload(Payload({"m.lora_B": torch.tensor([[b]])}), n, CTX) for b, n in ((1.0, 3), (5.0, 1))]
    new = aggregated(FFALoRA(), server, iter(uploads)).tensors
    assert new["m.lora_B"].tolist() == [[2.0]]
    assert new["m.lora_A"] is server.tensors["m.lora_A"]
    assert factor_product(new, "m").tolist() == [[4.0, -2.0]]
    clients = [{**server.tensors, **upload.payload.fields} for upload in uploads]
    assert aggregation_gap(clients, [3, 1]) == 0.0


def test_b_alone_is_trained_and_sent(lora_spec, lora_weights):
    method = FFALoRA()
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    data, payload, local = turn(method, server, lora_spec)
    assert set(payload.fields) == {n for n in lora_spec if n.endswith("lora_B")}
    assert all(torch.equal(local.started_from[0][n], w) for n, w in lora_weights.items())
    for name, w in lora_weights.items():
        if name.endswith("lora_A"):
            assert w.numpy().tobytes() not in data
        else:
            assert torch.equal(payload.fields[name], w + 0.5)


def test_over_rounds_a_moves_by_no_bit_and_b_is_fedavgs(lora_spec, lora_weights):
    method = FFALoRA()
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    for round_ in range(3):
        ctx = RoundContext(round_, "a", False, bytes(32))
        uploads = [
            AcceptedUpload(turn(method, server, lora_spec, step, ctx)[1], n, ctx) for step, n in ((0.5, 1), (2.0, 2))
        ]
        server = aggregated(method, server, iter(uploads))
    for name, w in lora_weights.items():
        expected = w if name.endswith("lora_A") else w + 3 * 1.5
        assert torch.equal(server.tensors[name], expected)


def test_an_upload_that_holds_a_is_refused_on_the_wire_and_ignored_in_a_sum(lora_spec, lora_weights):
    method = FFALoRA()
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    fat = Payload({n: w + 9 for n, w in lora_weights.items()})
    new = aggregated(method, server, iter([AcceptedUpload(fat, 1, CTX)])).tensors
    assert all(torch.equal(new[n], lora_weights[n]) for n in lora_spec if n.endswith("lora_A"))


@pytest.mark.parametrize("bits", [2, 8])
def test_b_in_codes(lora_spec, lora_weights, bits):
    method = FFALoRA(upload_bits=bits)
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    _, payload, _ = turn(method, server, lora_spec)
    assert all(isinstance(value, QuantizedTensor) for value in payload.fields.values())
    new = aggregated(method, server, iter([AcceptedUpload(payload, 1, CTX)])).tensors
    for name, w in lora_weights.items():
        torch.testing.assert_close(new[name], w if name.endswith("lora_A") else w + 0.5)


@pytest.mark.parametrize("fields,named", [("upload_bits = 1", "bits"), ('adapter = {kind = "all"}', "adapter")])
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("ffa_lora", fields)
