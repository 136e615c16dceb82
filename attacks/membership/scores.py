"""The membership attacks on one model, all from one pass over the rows.

| attack | score of a row (higher = more likely a member) | source |
|---|---|---|
| `<slice> <K>%` | minus the mean of the K % largest Rényi entropies (alpha 0.5) over a slice's positions | `renyi` |
| `loss` | minus the loss of the row's own target | Yeom et al. 2018 |
| `calibrated` | loss under the public base less loss under the model: what training changed | Watson et al. 2022 |

Slices: "image", "caption" (the row's own target by teacher forcing; "target" for a model without images), "generated". `other_alphas` has the slices' scores
under alpha 1, 2 and infinity. alpha 0.5 is the headline; it was chosen before any result was seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.attacks.membership import renyi
from fedveil.contract.spec import Weights
from fedveil.contract.task import Prediction, Rows, Task

Scores = dict[str, NDArray[np.float64]]

HEADLINE_ALPHA = 0.5
ALPHAS = (0.5, 1.0, 2.0, math.inf)
PERCENTS = (0, 10, 100)


@dataclass
class Base:
    """The public base that every adversary has: the task, and the adapter's weights of round 0.

    Losses of rows under it are kept: each row is asked about once.
    """

    task: Task
    initial: Weights
    _known: dict[int, tuple[Any, float]] = field(default_factory=dict)

    def losses(self, rows: Rows) -> NDArray[np.float64]:
        """Mean target loss of each row under the base."""
        unknown = list({id(row): row for row in rows if id(row) not in self._known}.values())
        for row, prediction in zip(unknown, self.task.predict(self.initial, unknown), strict=True):
            self._known[id(row)] = (row, loss_of(prediction))
        return np.array([self._known[id(row)][1] for row in rows])

    def scores(self, task: Task, weights: Weights, rows: Rows, generated_rows: int = 0) -> Scores:
        """Every attack's scores of `rows` under `weights`; the slice "generated" of the first `generated_rows` only."""
        entropies, losses = _entropies(task.predict(weights, rows))
        found = {**_of_slices(entropies, HEADLINE_ALPHA), "loss": -losses, "calibrated": self.losses(rows) - losses}
        if generated_rows:
            written, _ = _entropies(task.predict(weights, rows[:generated_rows], generate=True))
            found |= {k: v for k, v in _of_slices(written, HEADLINE_ALPHA).items() if k.startswith("generated")}
        return found

    def other_alphas(self, task: Task, weights: Weights, rows: Rows) -> dict[float, Scores]:
        """The slices' scores under every alpha but the headline's."""
        entropies, _ = _entropies(task.predict(weights, rows))
        return {alpha: _of_slices(entropies, alpha) for alpha in ALPHAS if alpha != HEADLINE_ALPHA}


def centred(
    members: NDArray[np.float64],
    non_members: NDArray[np.float64],
    member_labels: Sequence[str],
    other_labels: Sequence[str],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores less the mean of the non-members of the same label, itself left out; rows without such a mean are dropped.

    A client's model likes the labels that its client has. That is not membership, and a client's rows must not be called
    members for it. With one label for all, differences between scores stay as they are but for that mean.
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


def loss_of(prediction: Prediction) -> float:
    """Mean loss of a row's own target."""
    return float(torch.nn.functional.cross_entropy(prediction.logits["target"], prediction.wanted))


def _entropies(predictions: Iterator[Prediction]) -> tuple[renyi.Table, NDArray[np.float64]]:
    losses: list[float] = []

    def noted() -> Iterator[Prediction]:
        for prediction in predictions:
            losses.append(loss_of(prediction))
            yield prediction

    return renyi.entropy_table(noted(), ALPHAS), np.array(losses)


def _of_slices(table: renyi.Table, alpha: float, percents: Sequence[int] = PERCENTS) -> Scores:
    shown = {"target": "caption"} if "image" in table else {}
    return {
        f"{shown.get(name, name)} {percent}%": renyi.scores(table, name, alpha, percent)
        for name in table
        for percent in percents
    }
