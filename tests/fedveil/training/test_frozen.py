"""Tensors that are frozen for all steps of a training, or in turns."""

from __future__ import annotations

import pytest
import torch

from fedveil.contract.trainer import alternating_sets
from fedveil.errors import TaskError
from fedveil.ops.lora_algebra import factor_name, held_factors
from fedveil.rng import RandomStream
from tests.fedveil.training.small import DATA, KEY, make

KEYS = {"train__batch_size": 4, "train__learning_rate": 1e-2, "train__weight_decay": 0.3, "run__deterministic": True}
# A thousandth of the learning rate: AdamW divides by the gradient's own size, where that is near eps, rounding shows.
ATOL = 1e-5


@pytest.fixture(scope="module")
def task():
    return make(**KEYS)


@pytest.fixture(scope="module")
def rows(task):
    return task.encode(task.examples(DATA, "train")[:16])


@pytest.fixture(scope="module")
def start(task):
    generator = torch.Generator().manual_seed(2)
    return {n: 0.05 * torch.randn(s.shape, generator=generator) for n, s in task.spec.items()}


def by_hand(task, rows, start, moves):
    """Four steps of 4 rows. `moves`: the factors of each step; each factor has an optimiser that knows of no other."""
    task.put(start)
    sides = {side: [p for n, p in task.trained.items() if factor_name(n) == side] for side in "AB"}
    optimisers = {side: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.3) for side, ps in sides.items()}
    order = torch.randperm(16, generator=RandomStream(KEY).torch_generator()).tolist()
    for step, moved in enumerate(moves):
        batch = task.collate([rows[i] for i in order[4 * step : 4 * step + 4]])
        for optimiser in optimisers.values():
            optimiser.zero_grad()
        (task.loss_sum(batch) / batch.terms).backward()
        for side in moved:
            optimisers[side].step()
    return {n: p.detach().clone() for n, p in task.trained.items()}


@pytest.fixture
def states(monkeypatch):
    """The optimiser of the last training, by the names of its parameters that have states."""
    made = []
    create = torch.optim.AdamW.__init__

    def noted(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", noted)
    return lambda task: {n for n, p in task.trained.items() if made[-1].state.get(p)}


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_factor_that_stays_has_no_state_and_moves_by_no_bit(task, rows, start, states, side):
    """Nor does weight decay move it, and the other factor is moved as if it were the only one trained."""
    result = task.trainer(rows, RandomStream(KEY)).train(start, held_factors(task.spec, side))
    other = "B" if side == "A" else "A"
    assert states(task) == {n for n in task.spec if factor_name(n) == other}
    expected = by_hand(task, rows, start, [other] * 4)
    for name, w in result.weights.items():
        if factor_name(name) == side:
            assert torch.equal(w, start[name])
        else:
            torch.testing.assert_close(w, expected[name], rtol=1e-5, atol=ATOL)
            assert float((w - start[name]).abs().max()) > 1e-3


@pytest.mark.long
def test_sets_take_turns_a_step_each(task, rows, start, states):
    trained_weights = (
        task.trainer(rows, RandomStream(KEY))
        .train(start, [held_factors(task.spec, "A"), held_factors(task.spec, "B")])
        .weights
    )
    assert states(task) == set(task.spec)
    expected = by_hand(task, rows, start, ["B", "A", "B", "A"])
    for name, w in trained_weights.items():
        torch.testing.assert_close(w, expected[name], rtol=1e-5, atol=ATOL)
    other = by_hand(task, rows, start, ["A", "B", "A", "B"])
    assert max(float((other[n] - w).abs().max()) for n, w in trained_weights.items()) > 1e-4


def test_entries_take_turns_too_and_stay_as_the_other_steps_left_them(task, rows, start):
    """The left columns in one step, the right ones in the next."""
    left = {n: torch.arange(s.shape[1]) < s.shape[1] // 2 for n, s in task.spec.items()}
    right = {n: ~mask for n, mask in left.items()}
    local = lambda steps: make(**KEYS, train__max_steps=steps).trainer(rows, RandomStream(KEY))  # noqa: E731
    one, two = (local(steps).train(start, [left, right]).weights for steps in (1, 2))
    for name in task.spec:
        assert torch.equal(one[name][:, left[name]], start[name][:, left[name]])
        assert torch.equal(two[name][:, right[name]], one[name][:, right[name]])
        assert not torch.equal(two[name], one[name])


def test_one_set_in_turn_is_that_set(task, rows, start):
    alone, listed = (
        task.trainer(rows, RandomStream(KEY)).train(start, frozen).weights
        for frozen in (held_factors(task.spec, "A"), [held_factors(task.spec, "A")])
    )
    assert all(torch.equal(alone[n], listed[n]) for n in task.spec)


def test_a_gradient_of_what_stays_does_not_count_for_the_norm(task, rows, start, monkeypatch):
    norms = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda ps, most: norms.append(float(clip(ps, most))))
    bounded = make(**KEYS, train__max_grad_norm=1e-4, train__max_steps=1)
    for frozen in (None, held_factors(task.spec, "A"), held_factors(task.spec, "B")):
        bounded.trainer(rows, RandomStream(KEY)).train(start, frozen)
    assert norms[0] == pytest.approx((norms[1] ** 2 + norms[2] ** 2) ** 0.5, rel=1e-4)


def test_no_set_at_all_and_an_unknown_name_are_refused(task, rows, start):
    with pytest.raises(ValueError, match="frozen: at least one set"):
        alternating_sets([])
    with pytest.raises(TaskError, match="frozen: x is not a tensor of the spec"):
        task.trainer(rows, RandomStream(KEY)).train(start, [{}, {"x": torch.tensor(True)}])
    assert alternating_sets(None) == [{}]
