from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.trainer import BatchIndices, PerExampleGradients, TrainingResult, alternating_sets
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops.lora_algebra import factor_name
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.strategies.la_lora import LALoRA
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32), seeded=True)


class Coupled(ToyTrainer):
    """Three steps of plain SGD on ||B A||^2 / 2: a step on one factor sees where the step before left the other."""

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        self.started_from.append(dict(weights))
        now, sets = dict(weights), alternating_sets(frozen)
        for step in range(3):
            new = dict(now)
            for name in now:
                if name not in sets[step % len(sets)]:
                    module = name.rpartition(".")[0]
                    a, b = now[f"{module}.lora_A"], now[f"{module}.lora_B"]
                    new[name] = now[name] - 0.1 * (b.T @ b @ a if factor_name(name) == "A" else b @ a @ a.T)
            now = new
        return TrainingResult(now, {"steps": 3})


def test_mean_by_hand():
    server = FederatedState({"m.lora_A": torch.tensor([[2.0, -1.0]]), "m.lora_B": torch.tensor([[3.0]])})
    sent = (({"A": [[1.0, 0.0]], "B": [[1.0]]}, 3), ({"A": [[5.0, 8.0]], "B": [[5.0]]}, 1))
    uploads = [
        AcceptedUpload(Payload({f"m.lora_{s}": torch.tensor(v) for s, v in of.items()}), n, CTX) for of, n in sent
    ]
    new = aggregated(LALoRA(), server, iter(uploads)).tensors
    assert new["m.lora_A"].tolist() == [[2.0, 2.0]]
    assert new["m.lora_B"].tolist() == [[2.0]]


def test_the_factors_move_in_turns_and_both_are_sent(lora_spec, random_weights):
    """B, A, B by hand; from the received factors, and nothing is kept."""
    method, weights = LALoRA(), random_weights(lora_spec, 5)
    exchange, server = (
        MessageExchange(method, "la_lora", lora_spec),
        method.init(lora_spec, weights, rng.initial_stream(0, "x")),
    )
    private, parts = exchange.participate(exchange.broadcast(server, CTX), None, Coupled(lora_spec), CTX)
    assert private is None
    sent = exchange.receive(b"".join(parts), 0).payload.fields
    assert set(sent) == set(lora_spec)
    for module in ("h.0", "h.1"):
        a, b = weights[f"{module}.lora_A"], weights[f"{module}.lora_B"]
        b = b - 0.1 * b @ a @ a.T
        a = a - 0.1 * b.T @ b @ a
        b = b - 0.1 * b @ a @ a.T
        torch.testing.assert_close(sent[f"{module}.lora_A"], a)
        torch.testing.assert_close(sent[f"{module}.lora_B"], b)


class ThreeRows(ToyTrainer):
    """Every row's gradient is 3 in each entry; each batch holds all rows, and there are two steps."""

    def batches(self, sampling, steps, rng, skip=0):
        return [BatchIndices((0, 1, 2))] * steps

    def per_sample(self, weights, batch) -> PerExampleGradients:
        return PerExampleGradients({n: torch.full((3, *w.shape), 3.0) for n, w in weights.items()}, torch.zeros(3))


def test_noisy_steps_take_turns_and_clip_one_factor_alone(lora_spec, random_weights):
    """One step each. A row's gradient is scaled to C = 2 over the entries of that factor: 2 / sqrt(entries) each."""
    weights = random_weights(lora_spec, 5)
    local = NoisyTrainer(lora_spec, ThreeRows(lora_spec), DpSgdConfig(2.0, 0.0, 0.5), CTX)
    _, upload = LALoRA().client(None, Payload(weights), local, CTX)
    entries = {s: sum(w.numel() for n, w in weights.items() if factor_name(n) == s) for s in "AB"}
    for name, w in weights.items():
        step = 0.5 / 2 * 3 * 2 / entries[factor_name(name)] ** 0.5
        torch.testing.assert_close(upload.fields[name], w - step)


def test_a_single_noisy_step_moves_b_alone(lora_spec, random_weights):
    weights, rows = random_weights(lora_spec, 5), ThreeRows(lora_spec)
    rows.steps = 1
    _, upload = LALoRA().client(
        None, Payload(weights), NoisyTrainer(lora_spec, rows, DpSgdConfig(2.0, 1.0, 0.5), CTX), CTX
    )
    for name, w in weights.items():
        assert torch.equal(upload.fields[name], w) == (factor_name(name) == "A")


@pytest.mark.parametrize("fields,named", [("upload_bits = 1", "bits"), ('adapter = {kind = "all"}', "adapter")])
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("la_lora", fields)
