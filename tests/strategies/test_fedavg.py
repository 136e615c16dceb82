from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import param_specs_of
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies import create_method
from fedveil.strategies.fedavg import FedAvg
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32))


def upload(values, n: int) -> AcceptedUpload:
    return AcceptedUpload(Payload({"w": torch.tensor(values)}), n, CTX)


def test_mean_by_hand():
    """(3 * 1 + 1 * 5) / 4 = 2 and (3 * -2 + 1 * 6) / 4 = 0."""
    server = FederatedState({"w": torch.zeros(2)})
    new = aggregated(FedAvg(adapter=AllWeightsAdapter()), server, iter([upload([1.0, -2.0], 3), upload([5.0, 6.0], 1)]))
    assert new.tensors["w"].tolist() == [2.0, 0.0]


def test_one_upload_is_the_model_bit_for_bit():
    server = FederatedState({"w": torch.zeros(2)})
    new = aggregated(FedAvg(adapter=AllWeightsAdapter()), server, iter([upload([0.1, 1 / 3], 7)]))
    assert torch.equal(new.tensors["w"], torch.tensor([0.1, 1 / 3]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_uploads_are_summed_in_fp32(dtype):
    """2048 ones and a 1 + 2^-7 more: in fp16 or bf16 the mean of 2048 such numbers would have stalled."""
    method = FedAvg(adapter=AllWeightsAdapter(), wire_dtype=dtype)
    value = torch.tensor([1.0, 2.0, 4.0]).to(getattr(torch, dtype))
    uploads = (AcceptedUpload(Payload({"w": value * (1 if i % 2 else 3)}), 1, CTX) for i in range(2048))
    new = aggregated(method, FederatedState({"w": torch.zeros(3)}), uploads).tensors["w"]
    assert new.dtype == torch.float32
    torch.testing.assert_close(new, torch.tensor([2.0, 4.0, 8.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wire_dtype_sets_the_bytes(dtype, lora_spec, lora_weights):
    exchange = MessageExchange(FedAvg(wire_dtype=dtype), "fedavg", lora_spec)
    server = exchange.method.init(lora_spec, lora_weights, rng.initial_stream(0, "method init"))
    down = exchange.broadcast(server, CTX)
    _, parts = exchange.participate(down, None, ToyTrainer(lora_spec), CTX)
    up = b"".join(parts)
    entries = sum(w.numel() for w in lora_weights.values())
    assert exchange.receive(up, 0).payload_bytes == entries * (4 if dtype == "float32" else 2)


def test_client_trains_from_the_server_s_weights(lora_spec, lora_weights):
    local = ToyTrainer(lora_spec, step=0.5)
    private, up = FedAvg().client(None, Payload(lora_weights), local, CTX)
    assert private is None
    assert all(torch.equal(local.started_from[0][n], w) for n, w in lora_weights.items())
    assert all(torch.equal(up.fields[n], w + 0.5) for n, w in lora_weights.items())


def test_agrees_with_flower_s_own_fedavg():
    generator = torch.Generator().manual_seed(161803)
    weights = [torch.randn(5, 3, generator=generator) for _ in range(4)]
    counts = [31, 4, 159, 26]
    theirs = aggregate_arrayrecords(
        [
            RecordDict({"arrays": ArrayRecord({"w": w}), "metrics": MetricRecord({"num-examples": n})})
            for w, n in zip(weights, counts, strict=True)
        ],
        "num-examples",
    )
    uploads = (AcceptedUpload(Payload({"w": w}), n, CTX) for w, n in zip(weights, counts, strict=True))
    ours = aggregated(FedAvg(adapter=AllWeightsAdapter()), FederatedState({"w": torch.zeros(5, 3)}), uploads)
    np.testing.assert_allclose(ours.tensors["w"].numpy(), theirs["w"].numpy(), rtol=1e-5, atol=1e-6)


def test_all_weights_from_the_run_config():
    assert create_method("fedavg", 'adapter = {kind = "all"}').adapter == AllWeightsAdapter()
    assert param_specs_of({"w": torch.zeros(2, 3, dtype=torch.float16)})["w"].shape == (2, 3)
