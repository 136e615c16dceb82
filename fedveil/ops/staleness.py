"""Buffered asynchronous aggregation: what an upload for an earlier server state adds to the current one.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation.
AISTATS 2022. https://arxiv.org/abs/2106.06639

| paper | code | shape, unit |
|---|---|---|
| w^t | `current` | every tensor of the server's state after t steps |
| Delta_i | an upload minus `start`, the state that the site received | weights |
| tau_i | `staleness`: server steps since the site received its state | steps |
| s(tau) | `staleness_weight` | - |
| K | `cohort.buffer-size` | uploads per server step |

    s(tau) = 1 / sqrt(1 + tau)
    w^{t+1} = w^t + (1 / K) sum_i s(tau_i) Delta_i                               (Algorithm 1, with eta_g = 1)

A contribution of trained weights x_i becomes w^t + s(tau_i) (x_i - start_i), so the weighted mean of the contributions
is w^t plus the weighted mean of the scaled changes, and a method's own `server_update`, its aggregation rule and a
server optimizer are unchanged. A contribution of gradients or changes is multiplied by s(tau_i).

| case | result |
|---|---|
| tau = 0 | the contribution itself, bit for bit: with K sites of equal speed, the run is the synchronous one |
| a masked contribution | its entries outside the mask still do not count |
| a buffer that training does not change (BatchNorm) | (1 - s) w^t + s x_i: a variance must not be extrapolated |

Differences from the paper: the mean is weighted by the method's own weights, such as numbers of examples, instead of
1 / K; the learning rate of the server is `server.optimizer`'s; a site adds at most one upload to a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.contract.method import Sends
from fedveil.contract.param_spec import Weights

__all__ = ["rebase_contributions", "staleness_weight"]


def staleness_weight(staleness: int) -> float:
    """Return s(tau), above 0 and at most 1. Raises ValueError for a negative number of steps."""
    if staleness < 0:
        raise ValueError(f"staleness: expected a number of server steps of at least 0, found {staleness}")
    return 1 / math.sqrt(1 + staleness)


def rebase_contributions(
    terms: ClientContributions,
    staleness: int,
    kind: Sends,
    start: Weights,
    current: Weights,
    movable: Collection[str],
    wire_dtype: torch.dtype = torch.float32,
) -> ClientContributions:
    """Return an upload's contributions, moved from the state it was trained from to the current one.

    Args:
        staleness: tau, the number of server steps between the two states.
        kind: what the contributions are: trained "weights", or "gradients" or "changes".
        start: the server's tensors that the site received, before they were rounded for the wire.
        current: the server's tensors now, of the same names and shapes.
        movable: names of the tensors that training changes; the others are mixed instead of moved.
        wire_dtype: the type that the start was rounded to. The change is measured from there, because otherwise the
            rounding itself would count as training.

    Raises:
        ValueError: while the contributions are read, one of them has no counterpart in the states.
    """
    if staleness == 0:
        return terms
    scale = staleness_weight(staleness)

    def moved() -> Iterator[Contribution]:
        for term in terms.tensors:
            if kind != "weights":
                value = term.value.to(torch.float32) * scale
            else:
                value = _moved(term, scale, start, current, movable, wire_dtype)
            yield replace(term, value=value)

    return ClientContributions(moved(), terms.clear)


def _moved(
    term: Contribution,
    scale: float,
    start: Weights,
    current: Weights,
    movable: Collection[str],
    wire_dtype: torch.dtype,
) -> Tensor:
    if term.name not in start or term.name not in current:
        raise ValueError(f"{term.name}: the server's state has no such tensor; the method has a bug")
    now, value = current[term.name].to(torch.float32), term.value.to(torch.float32)
    before = start[term.name].to(wire_dtype).to(torch.float32) if term.name in movable else now
    return now.add(value - before, alpha=scale)
