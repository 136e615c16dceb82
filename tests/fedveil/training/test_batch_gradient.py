"""The gradient of one batch, which FedSGD sends."""

from __future__ import annotations

import pytest
import torch

from fedveil.errors import TaskError
from fedveil.rng import RandomStream
from tests.fedveil.training.small import KEY, gradients


@pytest.mark.usefixtures("one_thread")
def test_the_gradient_is_autograd_s_of_the_first_batch_of_the_stream(configured, rows, start):
    task = configured(train__batch_size=8, train__gradient_accumulation_steps=2, train__epochs=0)
    start_copy, seen = {n: w.clone() for n, w in start.items()}, []
    result = task.trainer(rows, RandomStream(KEY), seen.append).gradient(start)
    drawn = torch.randperm(29, generator=RandomStream(KEY).torch_generator()).tolist()[:8]
    task.base.put(start)
    expected = gradients(task, [rows[i] for i in drawn])
    assert {n: (g.shape, g.dtype) for n, g in result.weights.items()} == {
        n: (s.shape, s.dtype) for n, s in task.spec.items()
    }
    assert all(torch.equal(result.weights[n], g) for n, g in expected.items())
    assert all(g.any() for g in expected.values())
    assert all(torch.equal(start[n], w) for n, w in start_copy.items())
    assert all(torch.equal(p, start[n]) and p.grad is None for n, p in task.trained.items())
    batch = task.collate([rows[i] for i in drawn])
    with torch.no_grad():
        loss = float(task.loss_sum(batch) / batch.terms)
    assert result.report["loss_received"] == pytest.approx(loss, rel=1e-6)
    assert (result.report["tokens"], result.report["steps"]) == (sum(len(rows[i].ids) for i in drawn), 1)
    assert (seen[-1].step, seen[-1].steps) == (1, 1)


def test_the_gradient_is_the_first_step_of_train(configured, rows, start, monkeypatch):
    """What reaches the optimiser in `train` of one batch is what `gradient` gives, whatever was left over before."""
    given = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: given.append([p.grad.clone() for p in self.param_groups[0]["params"]])
    )
    task = configured(train__batch_size=5, train__max_steps=1)
    task.trainer(rows, RandomStream(KEY)).train(start)
    for parameter in task.trained.values():
        parameter.grad = torch.ones_like(parameter)
    result = task.trainer(rows, RandomStream(KEY)).gradient(start)
    for got, expected in zip(result.weights.values(), given[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    other = task.trainer(rows, RandomStream(KEY[::-1])).gradient(start)
    assert not any(torch.equal(result.weights[n], g) for n, g in other.weights.items())


def test_a_tensor_without_gradient_gives_zeros(configured, rows, start, monkeypatch):
    task = configured(train__batch_size=4)
    idle = torch.nn.Parameter(torch.ones(3))
    monkeypatch.setattr(type(task), "trained", {**task.trained, "idle": idle})
    monkeypatch.setattr(task, "put", lambda weights: None)
    result = task.trainer(rows, RandomStream(KEY)).gradient({**start, "idle": torch.ones(3)})
    assert result.weights["idle"].tolist() == [0.0, 0.0, 0.0]
    assert set(result.weights) == {*start, "idle"}


def test_a_gradient_of_a_loss_that_is_not_finite_is_refused(configured, rows, start):
    task = configured(train__batch_size=4)
    broken = {n: w * float("nan") for n, w in start.items()}
    with pytest.raises(TaskError, match=r"step 1 with .* did not give .*, but nan; .* examples (\d+, ){3}\d+; lower"):
        task.trainer(rows, RandomStream(KEY)).gradient(broken)
