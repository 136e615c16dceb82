"""Projection residuals: how far an example's gradient lies outside the span of a sent LoRA factor's update.

After Deng, Chen, Luo, Liu, Wang, Cai, Liu, Jia, Fu: Toward Efficient Membership Inference Attacks against Federated
Large Language Models: A Projection Residual Approach (ProjRes). IEEE S&P 2026, arXiv 2604.21197. We had only the
paper's abstract: the attack projects an example's hidden embeddings onto the subspace of a layer's gradient. This
version is for LoRA.

For y = W x + s B A x, with the inputs x_t (d) and the errors e_t = dL/dy_t (out) of an example's tokens t:

    dL/dA = s sum_t (B^T e_t) x_t^T   (r x d): its rows lie in the span of the example's inputs
    dL/dB = s sum_t e_t (A x_t)^T     (out x r): its columns lie in the span of the example's errors

    P_A: onto the rows of A_sent - A_broadcast,   P_B: onto the columns of B_sent - B_broadcast
    score(x) = -mean over layers of ||G(x) - P G(x)|| / ||G(x)||,   G(x) = the example's own gradient at the start

One step on one example moves a factor along that example's gradient, so the residual is 0. Unlike the cosine in
`alignment`, the residual does not depend on the direction within the span: a step that mixes or reverses the r
directions stays in the span.

| case | result |
|---|---|
| a factor that was not sent, or that changed in no layer | no score, or 0 for every example |
| A at the start, where B = 0 | 0, because dL/dA is 0 for every example |
| n examples in the step, or k steps | less accurate: the r directions contain less of each example's gradient |
| AdamW | its step is close to the signs of the entries, which have a different and full span |
| an example whose loss does not depend on a layer | that layer is ignored |

Adaptive note: a method that sends one factor gives that factor's score. Noise or quantization makes the span full, and
then every example has a residual. On the tiny text base with pairs of rank 8 and B away from 0, the AUROC from A and
from B was 1.00 and 1.00 for one example and one step of SGD, 1.00 and 1.00 for four examples, 0.82 and 0.81 for 16,
and 0.60 and 0.62 after one epoch of AdamW over 64 examples (means of 8, 5, 3 and 2 draws against 40 examples). So
neither factor reveals more here. An earlier pilot of a different size had 0.96 from A and 1.0 from B for one example,
0.62 and 0.98 for four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.gradient_attacks import Gradient, GradientAttack, GradientStatistic, Read
from fedveil.attacks.statistics import Scores

__all__ = ["FACTORS", "ProjectionResidualAttack", "projection_residual", "update_span"]

FACTORS = ("A", "B")
_RANK = 1e-4  # singular values below this fraction of the largest are rounding


def update_span(moved: Tensor, factor: str) -> Tensor:
    """Return orthonormal columns (n, rank) that span the rows of A's change, or the columns of B's change."""
    matrix = moved.double().T if factor == "A" else moved.double()
    left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
    basis: Tensor = left[:, sizes > _RANK * sizes[0]]
    return basis


def projection_residual(gradient: Tensor, basis: Tensor, factor: str) -> float:
    """Return ||G - P G|| / ||G||, from 0 to 1; 1 for a gradient of 0."""
    matrix = gradient.double().T if factor == "A" else gradient.double()
    size = float(matrix.norm())
    return float((matrix - basis @ (basis.T @ matrix)).norm()) / size if size else 1.0


def _residuals_on(turn: ObservedClientUpdate) -> Read:
    """Return a function that computes the negative mean residual over layers, by factor.

    It is 0 without layers, and NaN for a factor that was not sent.
    """
    spans = {name: update_span(d, _factor(name)) for name, d in turn.moved.items() if _factor(name) and bool(d.any())}
    sent = {_factor(name) for name in turn.moved}

    def read(gradient: Gradient) -> Sequence[float]:
        residuals: dict[str, list[float]] = {factor: [] for factor in FACTORS if factor in sent}
        for name, basis in spans.items():
            if name in gradient and bool(gradient[name].any()):
                factor = _factor(name)
                residuals[factor].append(-projection_residual(gradient[name], basis, factor))
        means = {factor: float(np.mean(values)) if values else 0.0 for factor, values in residuals.items()}
        return [means.get(factor, math.nan) for factor in FACTORS]

    return read


def _factor(name: str) -> str:
    """Return "A" or "B", or "" for a tensor that does not belong to a pair."""
    return next((factor for factor in FACTORS if name.endswith(f".lora_{factor}")), "")


_RESIDUALS = GradientStatistic("residuals", len(FACTORS), _residuals_on)


@dataclass(frozen=True)
class ProjectionResidualAttack(GradientAttack):
    """The scores "projection of A" and "projection of B", for the factors that the site sent.

    Attributes:
        uploads: number of the site's last uploads to average over.
    """

    uploads: int = 1
    cost = 4
    gauge = _RESIDUALS

    @property
    @override
    def name(self) -> str:
        return "Projection"

    @override
    def misfit(self, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
        if not any(_factor(name) for name in knowledge.task.spec):
            return "the run trains no LoRA pairs"
        return super().misfit(view, knowledge)

    @override
    def at(self, turns: ObservedClientUpdates, site: str) -> Sequence[int]:
        return range(len(turns.rounds(site)))[-self.uploads :]

    @override
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> dict[str, Scores]:
        of_turns = np.stack([of_turn for (of_turn,) in values]) if values else np.zeros((0, count, len(FACTORS)))
        sent = {factor: ~np.isnan(of_turns[:, :, i]) for i, factor in enumerate(FACTORS)}
        return {
            f"projection of {factor}": np.where(sent[factor], of_turns[:, :, i], 0.0).sum(0) / len(of_turns)
            for i, factor in enumerate(FACTORS)
            if sent[factor].any()
        }
