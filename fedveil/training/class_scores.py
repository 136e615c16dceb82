"""Classifier scores, from the logits of all scored examples.

| score | single-label | multi-label |
|---|---|---|
| accuracy | share of examples whose true class has the largest logit | share of examples with all labels correct
  (subset accuracy); a label is predicted if its logit is above 0 |
| macro_f1 | mean of 2 tp / (2 tp + fp + fn) over classes; classes that are neither in the data nor predicted are
  omitted | the same, over labels |
| auroc | for two classes, the AUROC of class 1; for more, the one-versus-rest mean | the mean over labels |

AUROC is defined only if every class has at least one positive and one negative example; ties count one half. Macro F1
is undefined only if no label is present or predicted. Undefined scores are omitted.

Single labels are integers; multi-labels are 1.0 or 0.0 for each class.
"""

from __future__ import annotations

import logging

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from fedveil.config import TaskConfig
from fedveil.contract.task import Metrics, TaskMetric
from fedveil.errors import TaskError

__all__ = [
    "SCORES",
    "area_under_roc",
    "loss_sum",
    "metrics_of",
    "positions_of",
    "score_examples",
    "score_labels",
    "score_single_class",
]

SCORES = ("accuracy", "macro_f1", "auroc")
log = logging.getLogger("fedveil.data")


def metrics_of(task: TaskConfig) -> Metrics:
    """Return the loss and all scores, as task metrics."""
    return {"loss": TaskMetric("lower"), **{name: TaskMetric("higher") for name in SCORES}}


def loss_sum(logits: Float[Tensor, "rows classes"], labels: Tensor) -> Tensor:
    """Return the loss summed over examples: cross entropy, or the mean binary cross entropy over labels."""
    if not labels.is_floating_point():
        return functional.cross_entropy(logits, labels, reduction="sum")
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / logits.shape[1]


def positions_of(logits: Float[Tensor, " classes"], label: Tensor) -> Float[Tensor, "positions choices"]:
    """Return one position with the logits of all classes, or for multi-label examples a "no"/"yes" pair per label."""
    if not label.is_floating_point():
        return logits[None]
    return torch.stack([torch.zeros_like(logits), logits], 1)  # softmax gives sigmoid(logit) for "yes"


def score_examples(logits: Float[Tensor, "rows classes"], labels: Tensor, metric: str) -> dict[str, float]:
    """Return "loss" and the scores of the examples. Undefined scores are omitted, with a log message.

    Raises:
        TaskError: `metric`, which is evaluate.metric, is undefined for these examples.
    """
    is_single = not labels.is_floating_point()
    scores = {"loss": float(loss_sum(logits, labels)) / len(labels)}
    scores |= score_single_class(logits, labels) if is_single else score_labels(logits, labels.bool())
    if lacking := [name for name in SCORES if name not in scores]:
        reason = (
            f"{' and '.join(lacking)} of {len(labels)} scored examples: each of the {logits.shape[1]} classes "
            "needs an example in it and one outside it, which some class lacks"
        )
        if metric in lacking:
            raise TaskError(f"evaluate.metric: {reason}; raise evaluate.eval-examples, add examples, or change it")
        log.warning("task.evaluation: no %s", reason)
    return scores


def score_single_class(logits: Float[Tensor, "rows classes"], labels: Int[Tensor, " rows"]) -> dict[str, float]:
    """Return the scores of single-label examples."""
    classes = logits.shape[1]
    truth = torch.nn.functional.one_hot(labels, classes).bool()
    predicted = torch.nn.functional.one_hot(logits.argmax(-1), classes).bool()
    probabilities = logits.double().softmax(-1)
    sides = range(1, 2) if classes == 2 else range(classes)
    return {
        "accuracy": float((logits.argmax(-1) == labels).double().mean()),
        **_macro_f1(predicted, truth),
        **_mean_area(probabilities[:, list(sides)], truth[:, list(sides)]),
    }


def score_labels(logits: Float[Tensor, "rows labels"], truth: Bool[Tensor, "rows labels"]) -> dict[str, float]:
    """Return the scores of multi-label examples."""
    predicted = logits > 0
    return {
        "accuracy": float((predicted == truth).all(1).double().mean()),
        **_macro_f1(predicted, truth),
        **_mean_area(logits.double(), truth),
    }


def _macro_f1(predicted: Bool[Tensor, "rows classes"], truth: Bool[Tensor, "rows classes"]) -> dict[str, float]:
    twice = 2 * (predicted & truth).sum(0).double()
    whole = predicted.sum(0) + truth.sum(0)
    known = whole > 0
    return {"macro_f1": float((twice[known] / whole[known]).mean())} if bool(known.any()) else {}


def _mean_area(scores: Float[Tensor, "rows classes"], truth: Bool[Tensor, "rows classes"]) -> dict[str, float]:
    areas = [area_under_roc(scores[:, i], truth[:, i]) for i in range(truth.shape[1])]
    known = [area for area in areas if area is not None]
    return {"auroc": sum(known) / len(known)} if len(known) == len(areas) else {}


def area_under_roc(scores: Float[Tensor, " rows"], truth: Bool[Tensor, " rows"]) -> float | None:
    """Return the share of (positive, negative) pairs in which the positive example has the higher score.

    Ties count one half. None if there are no such pairs.
    """
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return None
    _, which, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[which]  # equal scores share their mean rank, counted from 1
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))
