"""Token recovery from the span of one LoRA gradient succeeds on one step of SGD, and fails where it must."""

from __future__ import annotations

import pytest
import torch

from fedveil import paths, rng, strategies, tasks
from fedveil.attacks.membership.per_example_gradients import row_gradient
from fedveil.attacks.reconstruction import token_recovery
from fedveil.config import parse
from fedveil.rng import RandomStream

LAYER = "transformer.h.0.attn.c_attn"
A = f"{LAYER}.lora_A"
READ = 6  # positions that are read


def read_tokens(task, weights, moved_factor):
    inputs = [token_recovery.token_inputs(task, weights, LAYER, position) for position in range(READ)]
    return token_recovery.read_tokens(moved_factor, inputs)


@pytest.fixture(scope="module")
def setting():
    """A task with pairs of rank 64, weights as after some training, and rows of fewer tokens."""
    flat = {"method.name": "fedavg", "method.params": 'adapter = {kind = "lora", rank = 64}', "task.max-tokens": 48}
    config = parse(flat | {"train.batch-size": 1, "train.max-steps": 1, "train.learning-rate": 1e-3})
    task = tasks.load_task(config, strategies.create_method("fedavg", config.method.params).adapter, "cpu")
    drawn = torch.Generator().manual_seed(3)
    weights = {
        n: w + 0.02 * torch.randn(w.shape, generator=drawn) for n, w in task.initial(rng.initial_stream(0, "w")).items()
    }
    examples = task.examples(paths.find_folder("data") / "e2e", "train")[:40]
    rows = [row for row in task.encode(list(examples)) if READ < len(row.ids) < 48]
    assert len(rows) > 3
    return task, weights, rows


def moved(setting, row, weights=None) -> torch.Tensor:
    """One step of SGD on one row."""
    task, own, _ = setting
    task.put(weights or own)
    return -0.1 * row_gradient(task, row)[A]


@pytest.mark.long
def test_one_step_of_sgd_gives_every_token_of_a_row_away(setting):
    task, weights, rows = setting
    token_sets = read_tokens(task, weights, moved(setting, rows[0]))
    assert token_recovery.recovered_share(token_sets, rows[0].ids) == 1.0
    different = len(set(rows[0].ids))
    assert all(len(at) <= different for at in token_sets), "tokens of the row alone, perhaps at other places too"
    assert sum(len(at) for at in token_sets) < 3 * READ
    assert token_recovery.recovered_share(token_sets, rows[1].ids[::-1]) < 0.5, "another row's tokens are not there"


@pytest.mark.long
def test_it_loses_where_a_did_not_move_and_on_the_broadcast_of_a_run_that_begins(setting):
    task, weights, rows = setting
    assert read_tokens(task, weights, torch.zeros_like(weights[A])) == [set()] * READ
    at_zero = {n: torch.zeros_like(w) if n.endswith("lora_B") else w for n, w in weights.items()}
    assert (
        token_recovery.recovered_share(read_tokens(task, at_zero, moved(setting, rows[0], at_zero)), rows[0].ids) == 0.0
    )


@pytest.mark.long
def test_it_loses_with_more_tokens_than_directions_with_noise_and_with_adamw(setting):
    task, weights, rows = setting
    several = sum(moved(setting, row) for row in rows[:4])
    assert read_tokens(task, weights, several) == [set()] * READ
    one = moved(setting, rows[0])
    noisy = one + 0.1 * one.std() * torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    assert token_recovery.recovered_share(read_tokens(task, weights, noisy), rows[0].ids) == 0.0
    after = task.trainer(rows[:1], RandomStream(bytes(32))).train(weights).weights
    adamw = after[A] - weights[A]
    assert bool(adamw.any())
    assert token_recovery.recovered_share(read_tokens(task, weights, adamw), rows[0].ids) == 0.0


def test_a_span_that_is_full_or_not_finite_is_none():
    rank_one = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 4.0, 0.0, 0.0]))
    torch.testing.assert_close(
        token_recovery.gradient_span(rank_one).abs(), torch.tensor([[0.6, 0.8, 0.0, 0.0]]).double()
    )
    assert len(token_recovery.gradient_span(torch.eye(3, 4))) == 0
    assert len(token_recovery.gradient_span(torch.full((3, 4), float("nan")))) == 0
    assert token_recovery.recovered_share([{1}, {2, 3}, set()], [1, 3, 7, 9]) == pytest.approx(2 / 3)
