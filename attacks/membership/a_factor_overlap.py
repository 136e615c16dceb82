"""Overlap: how much of the update of A lies along an example's own gradient, for any B.

The server's last known B is 0 if a site sent only A and B was never seen. This happens in FedSA-LoRA,
FedRand with rho = 1, or a first client round that drew A. An example then has no gradient in A, so
`alignment` uses the overlap instead. It does not need B:

    dL/dA = s B^T G,    G = sum_t e_t x_t^T, a row's gradient in the layer's own weight (out x d_in)
    B' = EPSILON Q,     Q random with orthonormal columns: r random directions of G; the model hardly changes
    o_l = g_l D_l^T     (r x r), g_l = dL/dA at B' in layer l, D_l = A_sent - A_broadcast
    score = sqrt(sum_l |o_l|^2 / (sum_l |g_l|^2 sum_l |D_l|^2))

The norm of o_l has no sign and favors no direction. An example that moved A in any mix of its r directions
has a large norm. This score is our own. ProjRes (`projection_residual`) also relies on an example's gradient
lying in the span of its inputs.

| case | result |
|---|---|
| A did not change | 0 for every example |
| a layer without a pair | ignored |
| r above the number of rows of B | the remaining columns are 0 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedveil import rng
from fedveil.attacks.membership.client_updates import ObservedClientUpdate
from fedveil.attacks.membership.gradient_attacks import Gradient, Read

__all__ = ["EPSILON", "is_blind", "overlap_with", "probe_b_factor"]

EPSILON = 1e-3  # scale of the orthonormal columns: the model hardly changes, and a gradient's scale cancels
_A, _B = ".lora_A", ".lora_B"


def is_blind(turn: ObservedClientUpdate) -> bool:
    """Return whether the site sent only A and B is unknown, so that every B is 0."""
    alone = bool(turn.moved) and all(name.endswith(_A) for name in turn.moved)
    return alone and not any(bool(w.any()) for name, w in turn.start.items() if name.endswith(_B))


def probe_b_factor(turn: ObservedClientUpdate, number: int) -> ObservedClientUpdate:
    """Return the client round with every B replaced by B', drawn with the seed `number` at all sites and rounds."""
    start = dict(turn.start)
    for name, b in turn.start.items():
        if name.endswith(_B):
            generator = rng.initial_stream(number, f"probe {name}").torch_generator()
            directions, _ = torch.linalg.qr(torch.randn(b.shape, generator=generator))
            start[name] = b.new_zeros(b.shape)
            start[name][:, : directions.shape[1]] = EPSILON * directions
    return replace(turn, start=start, probe=number)


def overlap_with(turn: ObservedClientUpdate) -> Read:
    """Return a function that scores how an example's gradient overlaps with the update of A; 0 if either is 0."""
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
