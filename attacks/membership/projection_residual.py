"""Projection residuals: does a row's own gradient lie in the span of what a site sent of a LoRA factor?

After Deng, Chen, Luo, Liu, Wang, Cai, Liu, Jia, Fu: Toward Efficient Membership Inference Attacks against Federated
Large Language Models: A Projection Residual Approach (ProjRes). IEEE S&P 2026, arXiv 2604.21197. Only its abstract was
at hand: it projects hidden embeddings of a row on the subspace of a layer's gradient. What follows is made for LoRA.

For y = W x + s B A x, with the inputs x_t (d) and the errors e_t = dL/dy_t (out) of a row's tokens t:

    dL/dA = s sum_t (B^T e_t) x_t^T   (r x d): its rows lie in the span of the row's inputs
    dL/dB = s sum_t e_t (A x_t)^T     (out x r): its columns lie in the span of the row's errors

    P_A: on the rows of A_sent - A_broadcast,   P_B: on the columns of B_sent - B_broadcast
    score(x) = -mean over layers of ||G(x) - P G(x)|| / ||G(x)||,   G(x) = the row's own gradient at the start

One step of one row moves a factor along that row's gradient, so its residual is 0. Unlike the cosine of `alignment` it
does not ask where in the span the gradient lies: a step that mixes the r directions, or turns one round, stays in it.

| case | result |
|---|---|
| a factor that was not sent, or did not move in any layer | has no score, or 0 for every row |
| A at the start, where B = 0 | dL/dA is 0 for every row: 0 |
| n rows in the step, or k steps | r directions hold a share of each row's gradient: worse with each |
| AdamW | signs of the entries: the span is another one, and full |
| a row that does not reach a layer | that layer does not count |

Adaptive note: a method that sends one factor gives that one's score; noise or codes make the span full, and then every
row has a residual. On the tiny text base with pairs of rank 8 and B away from 0, the AUROC from A and from B was 1.00
and 1.00 for one row and one step of SGD, 1.00 and 1.00 for four rows, 0.82 and 0.81 for 16, and 0.60 and 0.62 after one
epoch of AdamW over 64 rows (means of 8, 5, 3 and 2 draws against 40 rows). So neither factor gives away more here; an
earlier pilot of another size had 0.96 from A and 1.0 from B for one row, 0.62 and 0.98 for four.
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
_RANK = 1e-4  # singular values below this part of the largest are rounding


def update_span(moved: Tensor, factor: str) -> Tensor:
    """(n, rank) orthonormal columns: of the rows of a move of A, or of the columns of one of B."""
    matrix = moved.double().T if factor == "A" else moved.double()
    left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
    basis: Tensor = left[:, sizes > _RANK * sizes[0]]
    return basis


def projection_residual(gradient: Tensor, basis: Tensor, factor: str) -> float:
    """||G - P G|| / ||G||, from 0 to 1; 1 for a gradient of 0."""
    matrix = gradient.double().T if factor == "A" else gradient.double()
    size = float(matrix.norm())
    return float((matrix - basis @ (basis.T @ matrix)).norm()) / size if size else 1.0


def _residuals_on(turn: ObservedClientUpdate) -> Read:
    """Minus a row's mean residual over layers, by factor; 0 where none counts, NaN for a factor that was not sent."""
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
    """ "A" or "B"; "" for a tensor that is of no pair."""
    return next((factor for factor in FACTORS if name.endswith(f".lora_{factor}")), "")


_RESIDUALS = GradientStatistic("residuals", len(FACTORS), _residuals_on)


@dataclass(frozen=True)
class ProjectionResidualAttack(GradientAttack):
    """The scores "projection of A" and "projection of B"; of the factors that the site sent.

    Attributes:
        uploads: of how many of the site's last uploads the mean is.
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
