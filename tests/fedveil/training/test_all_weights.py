"""Training all weights of a base, compared with training by hand, and the ownership of these weights."""

from __future__ import annotations

import pytest
import torch

from fedveil import config as run_config
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.errors import TaskError
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration
from tests.fedveil.training.small import KEY


@pytest.mark.long
def test_all_weights_train_under_checkpointing_too(rows):
    task = load_task(
        run_config.parse({"train.gradient-checkpointing": True, "train.max-steps": 1}), AllWeightsAdapter(), "cpu"
    )
    assert isinstance(task, TextGeneration)
    base = task.initial(RandomStream(KEY))
    plain = load_task(run_config.parse({"train.max-steps": 1}), AllWeightsAdapter(), "cpu")
    expected = plain.trainer(rows, RandomStream(KEY)).train(base)
    got = task.trainer(rows, RandomStream(KEY)).train(base)
    assert all(torch.equal(got.weights[n], expected.weights[n]) for n in base)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_all_weights_train_as_by_hand_and_belong_to_the_caller(rows):
    """Bit for bit; the model keeps no copy, and a second training changes nothing of the first."""
    task = load_task(run_config.parse({"train.batch-size": 8, "train.learning-rate": 1e-2}), AllWeightsAdapter(), "cpu")
    assert isinstance(task, TextGeneration)
    start = {n: w.clone() for n, w in task.initial(RandomStream(KEY)).items()}
    first = task.trainer(rows, RandomStream(KEY)).train(start).weights
    assert all(p.untyped_storage().nbytes() == 4 and p.isnan().all() for p in task.trained.values())
    first_copy = {n: w.clone() for n, w in first.items()}
    second = task.trainer(rows[:9], RandomStream(KEY)).train(first).weights
    assert all(torch.equal(first[n], w) and not torch.equal(second[n], w) for n, w in first_copy.items())
    assert all(torch.equal(task.initial(RandomStream(KEY))[n], w) for n, w in start.items())  # read anew
    task.put(start)
    optimiser = torch.optim.AdamW(task.trained.values(), lr=1e-2, weight_decay=1e-6, fused=True)
    order = torch.randperm(29, generator=RandomStream(KEY).torch_generator()).tolist()
    for i in range(0, 29, 8):
        optimiser.zero_grad()
        batch = task.collate([rows[j] for j in order[i : i + 8]])
        (task.loss_sum(batch) / batch.terms).backward()
        optimiser.step()
    assert all(torch.equal(first[n], p) for n, p in task.trained.items())


def test_weights_that_are_shown_are_read_where_they_lie_and_never_written(rows):
    task = load_task(run_config.parse({"train.max-steps": 1}), AllWeightsAdapter(), "cpu")
    assert isinstance(task, TextGeneration)
    start = dict(task.initial(RandomStream(KEY)))
    crooked = start | {"transformer.wte.weight": start["transformer.wte.weight"].T.contiguous().T}
    start_copy = {n: w.clone() for n, w in start.items()}
    for weights in (start, crooked):
        list(task.predict(weights, rows[:2]))
        shared = {n for n, p in task.trained.items() if p.data_ptr() == weights[n].data_ptr()}
        assert shared == {n for n, w in weights.items() if w.is_contiguous()}
        trained = task.trainer(rows, RandomStream(KEY)).train(weights).weights
        assert any(not torch.equal(trained[n], w) for n, w in start_copy.items())
        assert all(torch.equal(weights[n], w) for n, w in start_copy.items())
    with pytest.raises(TaskError, match="expected transformer.wte.weight of shape"):
        list(task.predict(start | {"transformer.wte.weight": torch.zeros(2, 2)}, rows[:1]))
