from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.quantization import BlockQuantizer
from fedveil.strategies.fedlpp import FedLPP
from fedveil.wire.envelope import EnvelopeStamp, unpack_message
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32))


def uploads():
    yield AcceptedUpload(Payload({"w": torch.tensor([4.0, 0.0])}), 1, CTX)
    yield AcceptedUpload(Payload({"w": torch.tensor([0.0, 8.0])}), 3, CTX)


def test_update_by_hand():
    """The mean change is (1, 6). Levels at 2 bits are -1, 0, .338, 1, so that (1, 0.3) is sent as (1, 0.338)."""
    server = FederatedState({"w": torch.tensor([1.0, 0.3])})
    assert aggregated(FedLPP(), server, uploads()).tensors["w"].tolist() == pytest.approx([2.0, 6.3])
    halved = aggregated(FedLPP(server_rate=0.5), server, uploads())
    assert halved.tensors["w"].tolist() == pytest.approx([1.5, 3.3])
    literal = aggregated(FedLPP(update="replace"), server, uploads())
    assert literal.tensors["w"].tolist() == pytest.approx([2.0, 6.338], abs=1e-3)


def test_no_upload_keeps_the_full_precision_of_either_update():
    server = FederatedState({"w": torch.tensor([1.0, 0.3])})
    for update in ("delta", "replace"):
        assert torch.equal(aggregated(FedLPP(update=update), server, iter([])).tensors["w"], server.tensors["w"])


@pytest.mark.parametrize("table,bits", [("nf", 1), ("nf", 2), ("nf", 4), ("nf_sym", 2), ("absmax", 4)])
def test_only_levels_go_down_and_the_change_comes_back(lora_spec, lora_weights, table, bits):
    method = FedLPP(table, bits, block=8)
    exchange = MessageExchange(method, "fedlpp", lora_spec)
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    data, local = exchange.broadcast(server, CTX), ToyTrainer(lora_spec)
    down = unpack_message(data, exchange.layout, EnvelopeStamp.from_exchange(method, "fedlpp", 0, "down")).payload
    proxy, how = method.models(server, down=down)["proxy"], BlockQuantizer(table, bits, 8)
    for name, w in lora_weights.items():
        assert isinstance(down.fields[name], QuantizedTensor)
        assert torch.equal(proxy[name], how.dequantise(how.quantise(w)))
        assert torch.equal(proxy[name] == 0, w == 0) or name.endswith("A")
        if name.endswith("A"):
            assert w.numpy().tobytes() not in data
            assert not torch.equal(proxy[name], w)
    _, up = exchange.participate(data, None, local, CTX)
    message = exchange.receive(b"".join(up), 0)
    assert all(torch.equal(local.started_from[0][n], p) for n, p in proxy.items())
    new = aggregated(method, server, iter([AcceptedUpload(message.payload, 3, CTX)])).tensors
    for name, w in lora_weights.items():
        torch.testing.assert_close(new[name], w + 0.5)


@pytest.mark.parametrize(
    "fields,named",
    [
        ("bits = 0", "bits"),
        ('quantiser = "absmax"\nbits = 1', "bits"),
        ("block = 0", "block"),
        ("server_rate = 0.0", "server_rate"),
        ("server_rate = inf", "server_rate"),
        ('adapter = {kind = "all"}', "adapter"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("fedlpp", fields)
