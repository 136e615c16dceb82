"""Scores of rows under one model: every attack on models from one pass over the rows.

The public base is asked about each row once, however many models are under attack. `center_scores` compares scores
within a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedveil.attacks.base import ModelAttack, ModelOutput
from fedveil.attacks.statistics import Scores
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import ExamplePrediction, Rows, Task

__all__ = ["PublicBaseScores", "center_scores", "target_loss"]


@dataclass
class PublicBaseScores:
    """The public base that every adversary has: the task, and the adapter's weights of round 0.

    It keeps the losses of the rows that it was asked about.
    """

    task: Task
    initial: Weights
    _known: dict[int, tuple[Any, float]] = field(default_factory=dict)

    def losses(self, rows: Rows) -> Scores:
        """(rows,) mean loss of each row's own target under the base, in nats."""
        unknown = list({id(row): row for row in rows if id(row) not in self._known}.values())
        for row, prediction in zip(unknown, self.task.predict(self.initial, unknown), strict=True):
            self._known[id(row)] = (row, target_loss(prediction))
        return np.array([self._known[id(row)][1] for row in rows])

    def scores(
        self, attacks: Sequence[ModelAttack], task: Task, weights: Weights, rows: Rows, generated_rows: int = 0
    ) -> dict[str, Scores]:
        """(rows,) scores of `rows` under `weights`, by the names that the attacks give them.

        The slice "generated" is of the first `generated_rows` rows, and its scores have as many entries.

        Raises:
            ValueError: two attacks that give a score of one name.
        """
        all_scores = self._scores(attacks, task.predict(weights, rows), rows)
        if generated_rows:
            first = rows[:generated_rows]
            written = self._scores(attacks, task.predict(weights, first, generate=True), first)
            all_scores |= {name: scores for name, scores in written.items() if name.startswith("generated")}
        return all_scores

    def _scores(
        self, attacks: Sequence[ModelAttack], predictions: Iterator[ExamplePrediction], rows: Rows
    ) -> dict[str, Scores]:
        scores_by_name: dict[str, list[float]] = {}
        for prediction, base_loss in zip(predictions, self.losses(rows), strict=True):
            answer = ModelOutput(prediction, target_loss(prediction), float(base_loss))
            given = [(name, score) for attack in attacks for name, score in attack.score(answer).items()]
            names = [name for name, _ in given]
            if len(set(names)) < len(names):
                raise ValueError(f"attacks: expected distinct names of scores, found {sorted(names)}; rename one")
            for name, score in given:
                scores_by_name.setdefault(name, []).append(score)
        return {name: np.array(scores) for name, scores in scores_by_name.items()}


def center_scores(
    members: Scores, non_members: Scores, member_labels: Sequence[str], other_labels: Sequence[str]
) -> tuple[Scores, Scores]:
    """Every score less the mean score of the non-members of the same label.

    A non-member is left out of its own mean. Rows without such a mean are dropped. A client's model likes the labels
    that its client has; that is no membership, and without this a client's rows would be called members for their
    labels.
    """
    groups = {
        label: non_members[[i for i, other in enumerate(other_labels) if other == label]] for label in set(other_labels)
    }
    mine = [
        m - groups[label].mean()
        for m, label in zip(members, member_labels, strict=True)
        if len(groups.get(label, ())) > 1
    ]
    known = set(member_labels)
    theirs = [
        n - (groups[label].sum() - n) / (len(groups[label]) - 1)
        for n, label in zip(non_members, other_labels, strict=True)
        if len(groups[label]) > 1 and label in known
    ]
    return np.array(mine), np.array(theirs)


def target_loss(prediction: ExamplePrediction) -> float:
    """Mean loss of a row's own target, in nats."""
    return float(torch.nn.functional.cross_entropy(prediction.logits["target"], prediction.wanted))
