"""Gradients of many rows computed together equal those of each row alone."""

from __future__ import annotations

import pytest
import torch

from fedveil.attacks.membership import per_example_gradients
from fedveil.attacks.membership.per_example_gradients import row_gradient, row_gradients
from fedveil.errors import TaskError
from fedveil.rng import RandomStream
from fedveil.training import per_example
from tests.fedveil.tasks import test_image_classification as images
from tests.fedveil.training.small import DATA, KEY, make


@pytest.fixture
def counted(monkeypatch):
    """How many rows each call of torch.func took."""
    taken, real = [], per_example.gradients_of_examples

    def of_samples(task, samples, spec, weights):
        taken.append(len(samples[0]))
        return real(task, samples, spec, weights)

    monkeypatch.setattr(per_example, "gradients_of_examples", of_samples)
    return taken


@pytest.fixture
def pictures(tmp_path):
    """Of a ViT that is trained whole: the second task that tells rows apart."""
    task = images.make()
    folder = images.save(
        tmp_path / "rows", [{"image": {"bytes": images.picture(i), "path": None}, "label": i % 3} for i in range(5)]
    )
    task.put(images.randomised(task))
    return task, task.encode(task.examples(folder, "train"))


def prepared(count: int = 7, **keys: object):
    task = make(**{"train__batch_size": 3} | keys)
    noise = torch.Generator().manual_seed(1)
    task.put({n: w + 0.05 * torch.randn(w.shape, generator=noise) for n, w in task.initial(RandomStream(KEY)).items()})
    return task, task.prepare(DATA, "train").rows[:count]


def is_each_alone(task, rows) -> None:
    gradients = dict(row_gradients(task, rows))
    assert sorted(gradients) == list(range(len(rows)))
    for place, row in enumerate(rows):
        alone = row_gradient(task, row)
        assert set(gradients[place]) == set(alone)
        length = float(torch.cat([g.flatten() for g in alone.values()]).norm())
        assert length > 0
        for name, g in alone.items():  # the gradient of a key's bias consists only of rounding errors
            torch.testing.assert_close(gradients[place][name], g, rtol=1e-3, atol=1e-5 * length)


@pytest.mark.long
def test_many_rows_at_once_have_each_ones_own_gradient(counted):
    """In numbers, too: an attack may read a gradient's length, and a longer row sums more terms."""
    task, rows = prepared()
    is_each_alone(task, rows)
    assert counted == [3, 3, 1]


def test_many_pictures_at_once_have_each_ones_own_gradient(pictures, counted):
    is_each_alone(*pictures)
    assert counted == [4, 1]


@pytest.mark.long
@pytest.mark.parametrize("keys", [{"train__loss_mask": "all"}, {"train__packing": True, "task__max_tokens": 128}])
def test_rows_whose_loss_in_steps_is_another_are_read_one_by_one(keys, counted):
    """The attacks ask about the target alone, whatever the steps learn."""
    is_each_alone(*prepared(3, **keys))
    assert not counted


@pytest.mark.long
def test_gradients_of_a_large_adapter_are_few_at_a_time(counted, monkeypatch):
    task, rows = prepared(3)
    monkeypatch.setattr(per_example_gradients, "MOST_BYTES", 2 * sum(p.nbytes for p in task.trained.values()) + 1)
    is_each_alone(task, rows)
    assert counted == [2, 1]


def test_a_row_without_a_target_pulls_nothing(counted):
    task, rows = prepared(3)
    ids = rows[1].ids
    rows = [rows[0], type(rows[1])(**vars(rows[1]) | {"start": len(ids)}), rows[2]]
    gradients = dict(row_gradients(task, rows))
    assert counted == [3]
    assert all(float(g.abs().sum()) == 0 for g in gradients[1].values())
    assert all(float(g.norm()) > 0 for g in gradients[0].values())


def test_a_model_that_cannot_be_taken_at_once_is_said_and_read_row_by_row(monkeypatch):
    task, rows = prepared(3)

    def refuses(*args):
        raise RuntimeError("vmap: data-dependent control flow\nand where")

    monkeypatch.setattr(type(task), "sample_loss", refuses)
    with pytest.warns(UserWarning, match="one example at a time: .* torch.func raises RuntimeError"):
        is_each_alone(task, rows)


def test_a_task_that_refuses_rows_apart_is_read_row_by_row(counted, monkeypatch):
    task, rows = prepared(3)

    def refuses(*args):
        raise TaskError("adapter.form: a prompt whose loss branches on values")

    monkeypatch.setattr(type(task), "samples", refuses)
    is_each_alone(task, rows)
    assert not counted
