"""Scores of classifiers compared with their definitions, counted over pairs and classes."""

from __future__ import annotations

import pytest
import torch

from fedveil.training import class_scores


def drawn(rows: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in steps of a half, so that some are equal, and labels that hold every class."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-4, 5, (rows, classes), generator=generator) / 2
    return logits, torch.cat([torch.arange(classes), torch.randint(0, classes, (rows - classes,), generator=generator)])


def area(scores: list[float], truth: list[bool]) -> float:
    """The share of pairs in the right order; ties count one half."""
    both = list(zip(scores, truth, strict=True))
    pairs = [(a, b) for a, is_a in both if is_a for b, is_b in both if not is_b]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def f1(predicted: list[bool], truth: list[bool]) -> float | None:
    right = sum(p and t for p, t in zip(predicted, truth, strict=True))
    return 2 * right / (sum(predicted) + sum(truth)) if any(predicted) or any(truth) else None


@pytest.mark.parametrize("classes, seed", [(2, 0), (2, 1), (3, 2), (3, 3), (5, 4)])
def test_scores_of_single_classes_equal_their_definitions(classes, seed):
    logits, labels = drawn(30, classes, seed)
    found = class_scores.score_single_class(logits, labels)
    best, probabilities = logits.argmax(-1).tolist(), logits.double().softmax(-1)
    assert found["accuracy"] == pytest.approx(sum(b == c for b, c in zip(best, labels.tolist(), strict=True)) / 30)
    each = [f1([b == k for b in best], (labels == k).tolist()) for k in range(classes)]
    assert found["macro_f1"] == pytest.approx(sum(each) / classes)
    ks = [1] if classes == 2 else range(classes)
    areas = [area(probabilities[:, k].tolist(), (labels == k).tolist()) for k in ks]
    assert found["auroc"] == pytest.approx(sum(areas) / len(areas))


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_several_labels_equal_their_definitions(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (25, 4), generator=generator) / 2
    truth = torch.randint(0, 2, (25, 4), generator=generator).bool()
    found, predicted = class_scores.score_labels(logits, truth), logits > 0
    assert found["accuracy"] == pytest.approx(sum(map(torch.equal, predicted, truth)) / 25)
    columns = [(logits[:, k].tolist(), predicted[:, k].tolist(), truth[:, k].tolist()) for k in range(4)]
    assert found["macro_f1"] == pytest.approx(sum(f1(p, t) for _, p, t in columns) / 4)
    assert found["auroc"] == pytest.approx(sum(area(s, t) for s, _, t in columns) / 4)


def test_a_perfect_a_reversed_and_a_constant_score():
    truth = torch.tensor([True, True, False, False, False])
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    assert class_scores.area_under_roc(scores, truth) == 1.0
    assert class_scores.area_under_roc(-scores, truth) == 0.0
    assert class_scores.area_under_roc(torch.zeros(5), truth) == 0.5


def test_scores_that_do_not_exist_are_left_out():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = class_scores.score_single_class(logits, torch.tensor([0, 1, 0]))  # no example of class 2
    assert found == {"accuracy": 1.0, "macro_f1": 1.0}  # class 2 is neither there nor predicted
    assert class_scores.score_labels(-torch.ones(2, 2), torch.zeros(2, 2).bool()) == {"accuracy": 1.0}
