"""Images with several labels: labels in files, loss and scores compared with torch's and with values by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fedveil import rng
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.task import Example
from fedveil.data.batches import LabelledBatch
from fedveil.errors import ConfigError, TaskError
from fedveil.training.per_example import per_example_gradients
from tests.fedveil.tasks.test_image_classification import image_folder, make, picture, randomised

NAMES = ("edema", "mass", "scar")
KEYS = {"task__class_names": ",".join(NAMES), "task__multi_label": True, "task__num_classes": 10}


def examples(*values: object) -> list[Example]:
    return list(Example.from_columns([{"image": picture(i), "label": value} for i, value in enumerate(values)]))


@pytest.fixture(scope="module")
def task():
    return make(**KEYS)


VALUES = {
    "edema": (1, 0, 0),
    " mass | edema ": (1, 1, 0),
    "": (0, 0, 0),
    "2": (0, 0, 1),
    "mass|mass|": (0, 1, 0),
}


@pytest.mark.parametrize("value", VALUES)
def test_the_labels_of_a_text(task, value):
    assert [row.label for row in task.encode(examples(value))] == [VALUES[value]]


def test_labels_of_other_forms(task):
    values = [["scar", "edema"], [], 1, [0, "mass"]]
    wanted = [(1, 0, 1), (0, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [row.label for row in task.encode(examples(*values))] == wanted


@pytest.mark.parametrize("value", [None, "edema;mass", "edema|Quendolin", ["edema", None], 3, "-1", {"edema": 1}])
def test_other_values_are_refused_without_the_value(task, value):
    with pytest.raises(
        TaskError, match=r'expected classes separated by "\|" or a list of them, of the 3 names'
    ) as error:
        task.encode(examples("edema", value))
    assert "Quendolin" not in str(error.value)


def test_the_folder_of_a_class_is_its_pictures_only_label(tmp_path):
    task = make(task__class_names="bird,cat,dog", task__multi_label=True, task__num_classes=10)
    labels = [row.label for row in task.encode(task.examples(image_folder(tmp_path / "folder"), "train"))]
    assert sorted(set(labels)) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.fixture(scope="module")
def rows(task):
    return task.encode(examples("edema|scar", "", "mass", "edema|mass|scar", "scar"))


def test_the_loss_is_the_mean_over_labels_of_the_binary_cross_entropy(task, rows):
    task.show(randomised(task))
    batch = task.collate(rows)
    assert batch.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]]
    with torch.no_grad():
        model = task.base.model(pixel_values=batch.inputs, labels=batch.labels)
    assert task.base.model.config.problem_type == "multi_label_classification"
    torch.testing.assert_close(task.loss_sum(batch) / len(rows), model.loss)
    torch.testing.assert_close(task.mean_loss(rows), float(model.loss))


def test_each_rows_gradient_is_that_of_the_row_alone(rows):
    task = make(LoraAdapter(rank=2), **KEYS)
    weights = randomised(task)
    together = per_example_gradients(task, task.spec, rows, weights)
    task.put(weights)
    for i, row in enumerate(rows):
        batch: LabelledBatch = task.collate([row])
        loss = task.loss_sum(batch)
        alone = torch.autograd.grad(loss, list(task.trained.values()))
        torch.testing.assert_close(together.losses[i], loss.detach(), rtol=1e-4, atol=1e-5)
        for name, gradient in zip(task.trained, alone, strict=True):
            torch.testing.assert_close(together.gradients[name][i], gradient, rtol=1e-3, atol=1e-5)


def test_the_scores_by_hand(task, rows, monkeypatch):
    """Logits in place of the model's: two of five pictures have all labels right."""
    logits = torch.tensor([[2.0, -1, 1], [-1, -1, -1], [1, 1, -1], [1, 1, -1], [1, -1, 1]])
    monkeypatch.setattr(task, "_logits", lambda batch: logits[: len(batch.labels)])
    monkeypatch.setattr(task, "_parts", lambda count: [range(count)])
    examples_ = examples("edema|scar", "", "mass", "edema|mass|scar", "scar")
    scores = task.evaluate(task.initial(rng.initial_stream(0, "weights")), examples_, False)
    truth = torch.tensor([row.label for row in rows])
    assert scores["accuracy"] == 2 / 5
    f1 = [2 * 2 / (2 * 2 + 2 + 0), 2 * 2 / (2 * 2), 2 * 2 / (2 * 2 + 0 + 1)]
    assert scores["macro_f1"] == pytest.approx(sum(f1) / 3)
    areas = [(2 + 1 + 0.5 * 2 + 1) / 6, 1.0, (4 + 0.5 * 2) / 6]  # pairs of a picture with and one without the label
    assert scores["auroc"] == pytest.approx(sum(areas) / 3)
    wanted = functional.binary_cross_entropy_with_logits(logits, truth)
    assert scores["loss"] == pytest.approx(float(wanted))


def test_predictions_are_one_of_two_classes_for_each_label(task, rows):
    weights = randomised(task)
    (first, *_) = task.predict(weights, rows)
    assert first.logits["target"].shape == (3, 2)
    assert first.wanted.tolist() == [1, 0, 1]
    task.show(weights)
    with torch.no_grad():
        logits = task._logits(task.collate(rows[:1]))[0]
    torch.testing.assert_close(first.logits["target"].softmax(-1)[:, 1], logits.sigmoid())


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="task.class-names: expected at least two class names"):
        make(task__multi_label=True)
    with pytest.raises(ConfigError, match=r'task.label-separator: "\|" occurs in the class name'):
        make(task__multi_label=True, task__class_names="a|b,c", task__num_classes=10)
    with pytest.raises(ConfigError, match='task.multi-label: the task "text-generation" does not support it'):
        make(LoraAdapter(rank=2), task__name="text-generation", task__model="tiny", task__multi_label=True)
