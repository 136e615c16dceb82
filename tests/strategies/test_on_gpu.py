"""Methods give the same results on a GPU as on a CPU. A dry run uses the CPU for both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedveil import rng
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamLocation, ParamSpec, Weights
from fedveil.contract.trainer import TrainingResult
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedqsn import FedQSN
from fedveil.strategies.random_binary import RandomBinary

SPEC = {
    "wte.weight": ParamSpec((300, 64), place=ParamLocation("embedding", "wte", 1)),
    "wpe.weight": ParamSpec((16, 64)),
    "in.weight": ParamSpec((64, 192), place=ParamLocation("linear", "in", 1)),
    "in.bias": ParamSpec((192,), place=ParamLocation("linear", "in", 0)),
    "out.weight": ParamSpec((64, 192), place=ParamLocation("linear", "out", 0, closes=True)),
    "out.bias": ParamSpec((64,), place=ParamLocation("linear", "out", 0, closes=True)),
}
CTX = RoundContext(1, "a", True, bytes(range(32)))


def weights(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=generator).to(device) for n, t in SPEC.items()}


def proxy(method: FedQSN, device: str) -> Payload:
    return method.broadcast(method.init(SPEC, weights(device), rng.initial_stream(0, "method init")), CTX)


@pytest.mark.gpu
@pytest.mark.parametrize("quantiser,bits", [("nf_sym", 2), ("nf_sym", 4), ("absmax", 4), ("none", 2)])
@pytest.mark.parametrize("targets", ["proj", "all"])
def test_a_proxy_is_that_of_the_cpu(gpu, quantiser, bits, targets):
    """Masks, scales, codes and open weights, bit for bit."""
    method = FedQSN(0.3, 0.3, targets, quantiser=quantiser, bits=bits)
    here, there = proxy(method, "cpu").fields, proxy(method, gpu).fields
    assert list(there) == list(here)
    codes = 0
    for name, value in here.items():
        gpu_value = there[name]
        if isinstance(value, QuantizedTensor):
            assert gpu_value.codes.device.type == gpu
            assert torch.equal(gpu_value.scales.cpu(), value.scales), name
            assert torch.equal(gpu_value.codes.cpu(), value.codes), name
            codes += value.codes.numel()
        else:
            assert torch.equal(gpu_value.cpu(), value), name
    assert (codes > 0) == (quantiser != "none")
    assert any(not v.all() for n, v in here.items() if n.startswith("visible."))


class OnDevice:
    """A client that computes on the device and moves what it gets."""

    spec, num_examples = SPEC, 3

    def __init__(self, device: str) -> None:
        self.device = device

    def gradient(self, received: Weights) -> TrainingResult:
        return TrainingResult({n: 2 * w.to(self.device) for n, w in received.items()}, {"steps": 1})

    def train(self, received: Weights, frozen: Weights | None = None, penalty=None) -> TrainingResult:
        return TrainingResult({n: 2 * w for n, w in received.items()}, {"steps": 1})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method,name",
    [
        (FedQSN(0.3, 0.3), "fedqsn"),
        (FedQSN(0.3, 0.3, quantiser="absmax", bits=4, upload_bits=3), "fedqsn"),
        (FedQSN(0.3, 0.3, quantiser="none"), "fedqsn"),
        (RandomBinary(rate=0.3), "random_binary"),
        (RandomBinary(rate=0.3, wire="seeded", wire_dtype="bfloat16"), "random_binary"),
        (RandomBinary(rate=0.5, wire="implicit", exchange="epoch"), "random_binary"),
    ],
)
def test_messages_made_on_a_gpu_have_the_bytes_of_those_made_on_a_cpu(gpu, method, name):
    """The broadcast, from weights on the CPU, and the upload."""
    exchange, made = MessageExchange(method, name, SPEC), []
    server = method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    for device in ("cpu", gpu):
        ctx = replace(CTX, device=torch.device(device) if device != "cpu" else None)
        down = exchange.broadcast(server, ctx)
        _, up = exchange.participate(down, None, OnDevice(device), ctx)
        made.append((down, b"".join(up)))
    assert made[0] == made[1]
