"""What a method makes on a GPU, as on a CPU. In a dry run the CPU is both."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng
from fedveil.contract.codec import Coded
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Place, TensorSpec
from fedveil.federation.exchange import Exchange
from fedveil.strategies.fedqsn import FedQSN

SPEC = {
    "wte.weight": TensorSpec((300, 64), place=Place("embedding", "wte", 1)),
    "wpe.weight": TensorSpec((16, 64)),
    "in.weight": TensorSpec((64, 192), place=Place("linear", "in", 1)),
    "in.bias": TensorSpec((192,), place=Place("linear", "in", 0)),
    "out.weight": TensorSpec((64, 192), place=Place("linear", "out", 0, closes=True)),
    "out.bias": TensorSpec((64,), place=Place("linear", "out", 0, closes=True)),
}
CTX = RoundContext(1, "a", True, bytes(range(32)))


def weights(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=generator).to(device) for n, t in SPEC.items()}


def proxy(method: FedQSN, device: str) -> Payload:
    return method.broadcast(method.init(SPEC, weights(device), rng.initial(0, "method init")), CTX)


@pytest.mark.gpu
@pytest.mark.parametrize("quantiser,bits", [("nf_sym", 2), ("nf_sym", 4), ("absmax", 4), ("none", 2)])
@pytest.mark.parametrize("targets", ["proj", "all"])
def test_a_proxy_is_that_of_the_cpu(gpu, quantiser, bits, targets):
    """Masks bit for bit, scales and open weights too; codes but for one in 10,000, halfway between two levels."""
    method = FedQSN(0.3, 0.3, targets, quantiser=quantiser, bits=bits)
    here, there = proxy(method, "cpu").fields, proxy(method, gpu).fields
    assert list(there) == list(here)
    codes = 0
    for name, value in here.items():
        found = there[name]
        if isinstance(value, Coded):
            assert found.codes.device.type == gpu
            assert torch.equal(found.scales.cpu(), value.scales), name
            assert float((found.codes.cpu() != value.codes).float().mean()) < 1e-4, name
            codes += value.codes.numel()
        else:
            assert torch.equal(found.cpu(), value), name
    assert (codes > 0) == (quantiser != "none")
    assert any(not v.all() for n, v in here.items() if n.startswith("visible."))


@pytest.mark.gpu
@pytest.mark.parametrize("quantiser,bits", [("absmax", 4), ("none", 2)])
def test_a_message_made_on_a_gpu_has_the_bytes_of_one_made_on_a_cpu(gpu, quantiser, bits):
    """With tables that need no kernel the codes are the same, so the whole message is."""
    method = FedQSN(0.3, 0.3, quantiser=quantiser, bits=bits)
    exchange = Exchange(method, "fedqsn", SPEC)
    made = [
        bytes(exchange.broadcast(method.init(SPEC, weights(device), rng.initial(0, "method init")), CTX))
        for device in ("cpu", gpu)
    ]
    assert made[0] == made[1]
