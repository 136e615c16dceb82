from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.lora_algebra import aggregation_gap, factor_name, parse_factor_name
from fedveil.strategies.rolora import RoLoRA
from tests.conftest import ToyTrainer, aggregated

SERVER = FederatedState({"m.lora_A": torch.tensor([[2.0, -1.0]]), "m.lora_B": torch.tensor([[3.0]])})


def context(round_: int) -> RoundContext:
    return RoundContext(round_, "a", False, bytes(32))


@pytest.mark.parametrize(
    "round_,side,values,expected",
    [
        (0, "B", ([[1.0]], [[5.0]]), [[2.0]]),
        (1, "A", ([[1.0, 0.0]], [[5.0, 8.0]]), [[2.0, 2.0]]),
        (2, "B", ([[1.0]], [[5.0]]), [[2.0]]),
    ],
)
def test_mean_by_hand(round_, side, values, expected):
    """Three times the first, once the second, over four. The other factor stays, and the mean of products is exact."""
    name, other = f"m.lora_{side}", "m.lora_A" if side == "B" else "m.lora_B"
    uploads = [
        AcceptedUpload(Payload({name: torch.tensor(v)}, side), n, context(round_))
        for v, n in zip(values, (3, 1), strict=True)
    ]
    new = aggregated(RoLoRA(), SERVER, iter(uploads)).tensors
    assert new[name].tolist() == expected
    assert new[other] is SERVER.tensors[other]
    clients = [{**SERVER.tensors, **upload.payload.fields} for upload in uploads]
    assert aggregation_gap(clients, [3, 1]) == 0.0


@pytest.mark.parametrize("round_", [0, 1, 2, 3])
def test_one_factor_is_trained_and_sent(lora_spec, random_weights, round_):
    method, weights, side = RoLoRA(), random_weights(lora_spec, 3), "BA"[round_ % 2]
    exchange, local = MessageExchange(method, "rolora", lora_spec), ToyTrainer(lora_spec)
    server = method.init(lora_spec, weights, rng.initial_stream(0, "x"))
    private, parts = exchange.participate(exchange.broadcast(server, context(round_)), None, local, context(round_))
    data = b"".join(parts)
    payload = exchange.receive(data, round_).payload
    assert private is None
    assert payload.variant == side
    assert set(payload.fields) == set(parse_factor_name(lora_spec, side))
    assert all(torch.equal(v, weights[n] + 0.5) for n, v in payload.fields.items())
    assert all(torch.equal(local.started_from[0][n], w) for n, w in weights.items())
    assert not any(w.numpy().tobytes() in data for w in weights.values())


def test_over_two_rounds_both_factors_move(lora_spec, random_weights):
    method, weights = RoLoRA(), random_weights(lora_spec, 3)
    exchange, server = (
        MessageExchange(method, "rolora", lora_spec),
        method.init(lora_spec, weights, rng.initial_stream(0, "x")),
    )
    for round_ in range(4):
        down, local = exchange.broadcast(server, context(round_)), ToyTrainer(lora_spec)
        _, parts = exchange.participate(down, None, local, context(round_))
        payload = exchange.receive(b"".join(parts), round_).payload
        server = exchange.aggregate(server, [AcceptedUpload(payload, 3, context(round_))])
        for name, w in weights.items():
            times = (round_ + 1) // 2 if factor_name(name) == "A" else round_ // 2 + 1
            assert torch.equal(server.tensors[name], w + 0.5 + 0.5 * (times - 1) if times else w)


def test_a_factor_of_another_round_is_left_out_of_the_mean(lora_spec, random_weights):
    method, weights, late = RoLoRA(), random_weights(lora_spec, 3), random_weights(lora_spec, 4)
    server = method.init(lora_spec, weights, rng.initial_stream(0, "x"))
    wrong = AcceptedUpload(Payload(parse_factor_name(late, "A"), "A"), 1, context(0))
    right = AcceptedUpload(Payload(parse_factor_name(late, "B"), "B"), 1, context(0))
    new = aggregated(method, server, iter([wrong, right])).tensors
    assert all(torch.equal(new[n], late[n] if factor_name(n) == "B" else weights[n]) for n in lora_spec)
    assert set(method.aggregate_shapes(lora_spec, 0)) == set(parse_factor_name(lora_spec, "B"))
    assert set(method.aggregate_shapes(lora_spec, 1)) == set(parse_factor_name(lora_spec, "A"))


@pytest.mark.parametrize("fields,named", [("upload_bits = 9", "bits"), ('adapter = {kind = "all"}', "adapter")])
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("rolora", fields)
