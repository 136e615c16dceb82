"""Scores of examples under one model: one pass over the examples serves every attack on models.

The public base scores each example once, for any number of attacked models. `center_scores` compares scores
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
    """The public base that every adversary has: the task, and the adapter weights of round 0.

    It caches the losses that it has computed.
    """

    task: Task
    initial: Weights
    _known: dict[int, tuple[Any, float]] = field(default_factory=dict)

    def losses(self, rows: Rows) -> Scores:
        """Return the mean loss of each example's own target under the base, in nats, shape (rows,)."""
        unknown = list({id(row): row for row in rows if id(row) not in self._known}.values())
        for row, prediction in zip(unknown, self.task.predict(self.initial, unknown), strict=True):
            self._known[id(row)] = (row, target_loss(prediction))
        return np.array([self._known[id(row)][1] for row in rows])

    def scores(
        self, attacks: Sequence[ModelAttack], task: Task, weights: Weights, rows: Rows, generated_rows: int = 0
    ) -> dict[str, Scores]:
        """Return each attack's scores for `rows` under `weights`, by name, of shape (rows,).

        The slice "generated" covers only the first `generated_rows` rows, and its scores have as many entries.

        Raises:
            ValueError: two attacks give scores with the same name.
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
                raise ValueError(f"attacks: two attacks use the same score name ({sorted(names)}); rename one")
            for name, score in given:
                scores_by_name.setdefault(name, []).append(score)
        return {name: np.array(scores) for name, scores in scores_by_name.items()}


def center_scores(
    members: Scores, non_members: Scores, member_labels: Sequence[str], other_labels: Sequence[str]
) -> tuple[Scores, Scores]:
    """Subtract from each score the mean score of the non-members with the same label.

    The mean for a non-member excludes that non-member. Examples for which this leaves no mean are dropped. A client's
    model favors the labels of its client. Without this correction, the attack would mistake this preference for
    membership.
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
    """Return the mean loss of an example's own target, in nats."""
    return float(torch.nn.functional.cross_entropy(prediction.logits["target"], prediction.wanted))
