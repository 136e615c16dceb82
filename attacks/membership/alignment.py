"""An adaptive attack on partial uploads: how well a sent factor's update aligns with an example's gradient.

The server knows the values at which a site's training starts, and the final values of each tensor that the site sent
(`client_updates`). Training on an example moves a tensor along the example's negative gradient. Per-example gradients
as membership signals: Nasr, Shokri, Houmansadr 2019, and Li, Rezaei, Liu 2023 (cosine attack).

    score(x) = mean over the last uploads of cos(-dL(x)/dS at the start, S_sent - S_broadcast),  S = the sent tensors

If a site sent only A and the server never saw B, the last known B is 0. An example then has no gradient in A, and the
cosine would be 0 for every example. So the score is the mean `a_factor_overlap` over PROBES random values of B.

Adaptive note: on the tiny LLaVA under FedSA-LoRA (six sites of 30 captions, 8 rounds of 12 steps of AdamW, one seed)
the cosine had an AUROC of 0.50 by construction, the overlap 0.78 on a site's own upload and 0.60 on another site's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.a_factor_overlap import is_blind, overlap_with, probe_b_factor
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.gradient_attacks import COSINE, GradientAttack, GradientStatistic, Read
from fedveil.attacks.statistics import Scores
from fedveil.contract.task import Rows

__all__ = ["PROBES", "AlignmentAttack", "alignment_scores"]

PROBES = 2  # number of random draws to replace a B that was never seen


def _aligned_with(turn: ObservedClientUpdate) -> Read:
    return COSINE.of(turn) if turn.probe is None else overlap_with(turn)


@dataclass(frozen=True)
class AlignmentAttack(GradientAttack):
    """The score "alignment": the mean cosine, or overlap, over the site's last uploads; 0 if nothing changed.

    Attributes:
        uploads: number of last uploads to use.
    """

    uploads: int = 1
    gauge = GradientStatistic("alignment", 1, _aligned_with)

    @property
    @override
    def name(self) -> str:
        return "Alignment"

    @override
    def at(self, turns: ObservedClientUpdates, site: str) -> Sequence[int]:
        return range(len(turns.rounds(site)))[-self.uploads :]

    @override
    def beside(self, turns: ObservedClientUpdates, site: str, index: int) -> Iterator[ObservedClientUpdate]:
        """Yield the client round as observed, or once per probe."""
        turn = turns.at(site, index)
        yield from (probe_b_factor(turn, number) for number in range(PROBES)) if is_blind(turn) else (turn,)

    @override
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> dict[str, Scores]:
        total = np.zeros(count)
        for of_turn in values:
            total += np.mean([read[:, 0] for read in of_turn], 0)
        return {"alignment": total / max(1, len(values))}


def alignment_scores(
    view: AdversaryView, site: str, knowledge: AdversaryKnowledge, rows: Rows, uploads: int = 1
) -> Scores:
    """Return each example's mean cosine over the site's last `uploads` uploads, shape (rows,); 0 if nothing changed.

    The task must compute its own gradients (`fedveil.training.gradient_backend.TrainableTask`).
    """
    return AlignmentAttack(uploads).scores(view, site, knowledge, rows)["alignment"]
