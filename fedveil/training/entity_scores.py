"""Scores of entities in sentences, as in seqeval's default mode and the CoNLL evaluation.

| score | meaning |
|---|---|
| accuracy | share of words with the correct tag |
| precision | share of the predicted entities that are in the data with the same first word, last word and name |
| recall | share of the data's entities that are predicted |
| f1 | 2 tp / (predicted entities + entities in the data), over all sentences |

An entity is a run of B-X I-X ...; an I-X that does not continue an entity named X also begins one, because predictions
need not follow IOB2. If no entity is predicted, precision is 0. If the data has no entity, only accuracy is defined.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fedveil.config import TaskConfig
from fedveil.contract.task import Metrics, TaskMetric
from fedveil.errors import TaskError

__all__ = ["SCORES", "entities_of", "metrics_of", "score_sentences"]

SCORES = ("accuracy", "precision", "recall", "f1")
log = logging.getLogger("fedveil.data")


def metrics_of(task: TaskConfig) -> Metrics:
    """Return the loss and all scores, as task metrics."""
    return {"loss": TaskMetric("lower"), **{name: TaskMetric("higher") for name in SCORES}}


def entities_of(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the entities of a sentence with these IOB2 tags: first word, the word after the last one, and name."""
    entities = set[tuple[int, int, str]]()
    start, open_name = 0, ""
    for at, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        if open_name and (mark != "I" or name != open_name):
            entities.add((start, at, open_name))
            open_name = ""
        if mark != "O" and not open_name:
            start, open_name = at, name
    return entities


def score_sentences(
    predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]], metric: str
) -> dict[str, float]:
    """Return the scores of sentences, given the predicted and the correct tags of their words.

    Raises:
        TaskError: `metric`, which is evaluate.metric, is a score that is undefined because there is no entity.
    """
    words = sum(map(len, wanted))
    right = sum(a == b for one, other in zip(predicted, wanted, strict=True) for a, b in zip(one, other, strict=True))
    scores = {"accuracy": right / words}
    found, true = ([entities_of(tags) for tags in each] for each in (predicted, wanted))
    count, of_data = sum(map(len, found)), sum(map(len, true))
    if not of_data:
        reason = f"of {len(wanted)} scored examples: their tags contain no entity"
        if metric in SCORES and metric not in scores:
            raise TaskError(
                f"evaluate.metric: {metric} {reason}; raise evaluate.eval-examples, add examples, or change it"
            )
        log.warning("task.evaluation: no precision, recall and f1 %s", reason)
        return scores
    both = sum(len(a & b) for a, b in zip(found, true, strict=True))
    return scores | {
        "precision": both / count if count else 0.0,
        "recall": both / of_data,
        "f1": 2 * both / (count + of_data),
    }
