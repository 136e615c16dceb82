"""Overlap: how much of what moved A lies along a row's own gradient, whatever B is.

Where B never leaves a site (FedSA-LoRA, FedRand with rho = 1), the server's last sight of it is 0, and at B = 0 a row
has no gradient in A: `alignment` then scores all rows 0, which says nothing of the site. B is not needed:

    dL/dA = s B^T G,    G = sum_t e_t x_t^T, a row's gradient in the layer's own weight (out x d_in)
    B' = EPSILON Q,     Q drawn with orthonormal columns, where B is not known: r random directions of G, at next to
                        the same model; where it is known, B' = B
    o_l = g_l D_l^T     (r x r), g_l = dL/dA at B' in layer l, D_l = A_sent - A_broadcast
    score = mean over PROBES draws of sqrt(sum_l |o_l|^2 / (sum_l |g_l|^2 sum_l |D_l|^2))

The norm of o_l has no sign, and asks for no single direction: a row that moved A in any mix of its r directions has a
large one. It is ours; that a row's gradient lies in the span of its inputs is the premise of ProjRes (`projection`).

| case | result |
|---|---|
| A that was not sent in any turn | no score |
| the last turn did not send A (FedRand, RoLoRA) | the last one that did |
| A that did not move | 0 for every row |
| B known | the overlap of A alone, which `alignment` has beside that of B: the audit leaves it out |

Adaptive note: on the tiny LLaVA under FedSA-LoRA (six sites of 30 captions, 8 rounds of 12 steps of AdamW, one seed)
`alignment` had an AUROC of 0.50 by construction; this one 0.78 on a site's own upload and 0.60 on another site's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedveil import rng
from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.membership.row_gradients import Gauge, Gradient, GradientAttack, Read
from fedveil.attacks.membership.turns import Turn, Turns
from fedveil.attacks.statistics import Scores
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows

PROBES = 2  # draws of B'
EPSILON = 1e-3  # of orthonormal columns: the model hardly changes, and a gradient's scale cancels
_A, _B = ".lora_A", ".lora_B"


def probed(start: Weights, number: int) -> dict[str, Tensor]:
    """The same weights with B' for every B that is 0: the same for all sites and rounds."""
    found = dict(start)
    for name, b in start.items():
        if name.endswith(_B) and not bool(b.any()):
            generator = rng.initial(number, f"probe {name}").torch_generator()
            directions, _ = torch.linalg.qr(torch.randn(b.shape, generator=generator))
            found[name] = b.new_zeros(b.shape)
            found[name][:, : directions.shape[1]] = EPSILON * directions
    return found


def _overlap_with(turn: Turn) -> Read:
    moved = {name: d.double() for name, d in turn.moved.items() if name.endswith(_A)}
    length = sum(float(d.square().sum()) for d in moved.values())

    def read(gradient: Gradient) -> Sequence[float]:
        together = own = 0.0
        for name, d in moved.items():
            if name in gradient:
                g = gradient[name].double()
                together += float((g @ d.T).square().sum())
                own += float(g.square().sum())
        return ((together / (own * length)) ** 0.5 if own and length else 0.0,)

    return read


@dataclass(frozen=True)
class Overlap(GradientAttack):
    """The score "overlap of A", on the last turn in which the site sent A."""

    cost = 6
    gauge = Gauge("overlap", 1, _overlap_with)

    @override
    def misfit(self, view: View, knowledge: Knowledge) -> str:
        exchange = view.exchange
        up = {field.name: field.variants for field in exchange.layout.fields if field.direction == "up"}
        if not any(name.endswith(_A) for name in up):
            return "the sites send no A of a LoRA pair"
        if all(up.get(name) == () for name in exchange.spec if name.endswith(_B)):
            return "every upload has B, and alignment reads it"
        return super().misfit(view, knowledge)

    @override
    def at(self, turns: Turns, site: str) -> Sequence[int]:
        for index in reversed(range(len(turns.rounds(site)))):
            if any(name.endswith(_A) for name in turns.at(site, index).moved):
                return [index]
        return []

    @override
    def beside(self, turns: Turns, site: str, index: int) -> Iterator[Turn]:
        """The turn, once for each probe."""
        turn = turns.at(site, index)
        for number in range(PROBES):
            yield replace(turn, start=probed(turn.start, number))

    @override
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> dict[str, Scores]:
        if not values:
            return {}
        (probes,) = values
        return {"overlap of A": np.mean([probe[:, 0] for probe in probes], 0)}


def overlap_scores(view: View, site: str, knowledge: Knowledge, rows: Rows) -> dict[str, Scores]:
    """(rows,) scores by name; none of a site that never sent A.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`).
    """
    return dict(Overlap().scores(view, site, knowledge, rows))
