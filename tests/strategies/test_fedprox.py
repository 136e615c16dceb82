"""FedProx; tests/fedveil/training/test_penalty.py compares its term with its formula on a real model."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedprox import FedProx
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)


class Descent(ToyTrainer):
    """Two steps of SGD at rate 0.1 on a loss of slope -5 in every entry, and the penalty."""

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        now = {n: w.clone() for n, w in weights.items()}
        for _ in range(2):
            leaves = {n: w.requires_grad_() for n, w in now.items()}
            loss = sum(-5 * w.sum() for w in leaves.values()) + (penalty(leaves) if penalty else 0.0)
            loss.backward()
            now = {n: (w - 0.1 * w.grad).detach() for n, w in leaves.items()}
        return TrainingResult(now, {"steps": 2})


def test_two_steps_by_hand(lora_spec, lora_weights):
    """mu = 4: the first step moves by 0.5, where the pull is 2; the second moves by 0.1 (5 - 2) = 0.3."""
    _, up = FedProx(4.0).client(None, Payload(lora_weights), Descent(lora_spec), CTX)
    for name, w in lora_weights.items():
        torch.testing.assert_close(up.fields[name], w + 0.8)


def test_mean_by_hand():
    server = FederatedState({"w": torch.zeros(2)})
    uploads = [AcceptedUpload(Payload({"w": torch.tensor(v)}), n, CTX) for v, n in (([1.0, -2.0], 3), ([5.0, 6.0], 1))]
    assert aggregated(FedProx(), server, iter(uploads)).tensors["w"].tolist() == [2.0, 0.0]


def test_without_mu_it_is_fedavg_bit_for_bit(lora_spec, lora_weights):
    sent = []
    for method in (FedProx(0.0), FedAvg()):
        exchange = MessageExchange(method, "same", lora_spec)
        server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
        down = exchange.broadcast(server, CTX)
        private, parts = exchange.participate(down, None, Descent(lora_spec), CTX)
        assert private is None
        sent.append((down, b"".join(parts), server.tensors))
    (down, up, weights), (other_down, other_up, other_weights) = sent
    assert down == other_down
    assert up == other_up
    assert weights.keys() == other_weights.keys()


def test_under_noisy_steps_the_term_pulls_after_the_noise(lora_spec, lora_weights):
    """Toy rows have the gradient -0.5 in every entry; noise 0. The second step is pulled, the first is not."""
    rows, how = ToyTrainer(lora_spec, step=0.5), DpSgdConfig(1e9, 0.0, 0.1)
    free, pulled = (
        FedProx(mu).client(None, Payload(lora_weights), NoisyTrainer(lora_spec, rows, how, CTX), CTX)[1].fields
        for mu in (0.0, 4.0)
    )
    one = ToyTrainer(lora_spec, step=0.5)
    one.steps = 1
    first = FedProx(4.0).client(None, Payload(lora_weights), NoisyTrainer(lora_spec, one, how, CTX), CTX)[1].fields
    for name, w in lora_weights.items():
        torch.testing.assert_close(pulled[name], free[name] - 0.1 * 4.0 * (first[name] - w), rtol=1e-5, atol=1e-6)
        assert not torch.equal(pulled[name], free[name])


@pytest.mark.parametrize("fields", ["mu = -1.0", "mu = nan", "mu = inf"])
def test_bad_mu_is_refused(fields):
    with pytest.raises(ConfigError, match="mu: expected a finite number of at least 0"):
        strategies.create_method("fedprox", fields)
