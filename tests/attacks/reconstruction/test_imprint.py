"""The imprinting pair succeeds on one step of FedAvg, and fails in the cases where it must."""

from __future__ import annotations

import pytest
import torch

from fedveil import paths, rng, strategies, tasks
from fedveil.attacks.reconstruction import imprint
from fedveil.config import parse
from fedveil.rng import RandomStream

LAYER = "transformer.h.0.mlp.c_fc"
POSITIONS = range(2, 5)


@pytest.fixture(scope="module")
def setting():
    """Task, initial weights, four rows of a site, and the gate that the server fits on other rows."""
    flat = {"method.name": "fedavg", "method.params": 'adapter = {kind = "lora", rank = 16}', "task.max-tokens": 64}
    config = parse(flat | {"train.batch-size": 4, "train.max-steps": 1, "train.learning-rate": 1e-3})
    task = tasks.load_task(config, strategies.create_method("fedavg", config.method.params).adapter, "cpu")
    initial = task.initial(rng.initial_stream(0, "weights"))
    folder = paths.find_folder("data") / "e2e"
    rows = task.encode(task.examples(folder, "train"))[4:400:99]
    public = task.encode(task.examples(folder, "test"))[:60]
    return config, task, initial, rows, public, imprint.gate_direction(task, initial, LAYER, POSITIONS, public)


def recovered(setting, sent, rows=None) -> float:
    """The share of the rows whose beginnings one upload gives away."""
    config, task, initial, own, public, _ = setting
    rows = rows or own
    answered = task.trainer(rows, RandomStream(bytes(32))).train(sent).weights
    learned = imprint.recover_gradient(sent, answered, LAYER, config.train.learning_rate, config.train.weight_decay)
    prefix = tuple(public[0].ids[: POSITIONS.start])
    prefixes = imprint.recover_prefixes(task, initial, LAYER, learned, prefix, POSITIONS.stop)
    truth = [tuple(row.ids[: POSITIONS.stop]) for row in rows]
    return sum(t in prefixes for t in truth) / len(truth)


@pytest.mark.long
def test_one_upload_gives_the_beginnings_of_all_rows_away(setting):
    _, task, initial, rows, _, gate = setting
    assert len({tuple(row.ids[: POSITIONS.stop]) for row in rows}) > 1
    assert recovered(setting, imprint.craft_broadcast(task, initial, LAYER, gate, 20.0)) == 1.0


@pytest.mark.long
def test_it_loses_on_an_honest_broadcast_and_on_a_gate_that_does_not_close(setting):
    _, task, initial, _, _, gate = setting
    assert recovered(setting, initial) == 0.0
    assert recovered(setting, imprint.craft_broadcast(task, initial, LAYER, gate, 0.01)) == 0.0


def test_an_upload_without_a_says_nothing(setting):
    _, task, initial, _, _, gate = setting
    sent = imprint.craft_broadcast(task, initial, LAYER, gate, 20.0)
    assert imprint.recover_gradient(sent, {f"{LAYER}.lora_B": sent[f"{LAYER}.lora_B"]}, LAYER, 1e-3, 0.0) is None
    assert imprint.recover_prefixes(task, initial, LAYER, None, (1, 2), 5) == set()


def test_the_first_step_of_adamw_is_solved_for_the_gradient():
    """g / (|g| + 1e-8), times the rate, behind the decay."""
    a, g = torch.zeros(3, 4), torch.tensor([[2e-9, -1e-8, 0.0, 5e-10]] * 3)
    step = torch.optim.AdamW([p := torch.nn.Parameter(a.clone())], lr=1e-3, weight_decay=0.01)
    p.grad = g
    step.step()
    name = "m.lora_A"
    gradient = imprint.recover_gradient({name: a}, {name: p.detach()}, "m", 1e-3, 0.01)
    torch.testing.assert_close(gradient, g[1:].double(), rtol=1e-4, atol=0.0)
