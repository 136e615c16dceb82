"""The adaptive attacker on partial uploads: does the sent factor's update point where this row would push it?

The server knows where a site started, and sees where it left what it sent (`turns`). A row that was trained on has
moved a tensor along minus the row's own gradient. Gradients of single rows as membership signals: Nasr, Shokri,
Houmansadr 2019, and Li, Rezaei, Liu 2023 (cosine attack).

    score(x) = mean over the last uploads of cos(-dL(x)/dS at the start, S_sent - S_broadcast),  S = the sent tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.membership.row_gradients import COSINE, GradientAttack
from fedveil.attacks.membership.turns import Turns
from fedveil.attacks.statistics import Scores
from fedveil.contract.task import Rows


@dataclass(frozen=True)
class Alignment(GradientAttack):
    """The score "alignment": the mean cosine over the site's last uploads; 0 where nothing moved.

    Attributes:
        uploads: how many.
    """

    uploads: int = 1
    gauge = COSINE

    @override
    def at(self, turns: Turns, site: str) -> Sequence[int]:
        return range(len(turns.rounds(site)))[-self.uploads :]

    @override
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> dict[str, Scores]:
        total = np.zeros(count)
        for (of_turn,) in values:
            total += of_turn[:, 0]
        return {"alignment": total / max(1, len(values))}


def alignment_scores(view: View, site: str, knowledge: Knowledge, rows: Rows, uploads: int = 1) -> Scores:
    """(rows,) mean cosine of each row over the site's last `uploads` uploads; 0 where nothing moved.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`).
    """
    return Alignment(uploads).scores(view, site, knowledge, rows)["alignment"]
