"""FedMIA: a row is a member of a site where that site's upload points along its gradient further than the others' do.

Zhu, Li, Gu, Yao, Fan, Han: FedMIA: An Effective Membership Inference Attack Exploiting "All for One" Principle in
Federated Learning. CVPR 2025, arXiv 2402.06289. Only its abstract, the start of its text and its README were at hand.

At most one site has a row, so the uploads of all others show what an upload looks like that the row did not move.

    M_k(x) = cosine of -dL(x)/dS at the start with what site k moved, S = the tensors that it sent (see `alignment`)
    z_t(x) = (M_site - mean of the others' M) / deviation of the others' M        in round t
    score  = mean over rounds of ln Phi(z_t)                                      other sites are the null distribution

| case | result |
|---|---|
| fewer than OWN_SPREAD others in a used round | M_site - mean of the others' M: a deviation of few values is noise |
| a round in which no other site sent the same tensors | not used |
| no such round | 0 for every row |
| one site | the audit leaves it out |
| others that agree to the bit | a least deviation of 1e-3 |

Adaptive note: what all sites share (a gradient that every row of the task has) cancels, which `alignment` cannot do;
sites whose rows are of another kind make bad nulls, and the control of wrong sites tells. Under FedRand the others are
those that drew the same factor. Differences from the paper: one measurement, and the last ROUNDS alone; the case of few
others is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedveil.attacks.base import Knowledge, UploadAttack, View
from fedveil.attacks.membership.alignment import Turn, cosine, row_gradient, turns
from fedveil.attacks.membership.lira import log_cdf
from fedveil.attacks.statistics import Scores
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows

ROUNDS, OTHERS, OWN_SPREAD = 4, 12, 8  # most rounds and others that are used; others for a deviation of a row's own
_LEAST_STD = 1e-3


class FedMia(UploadAttack):
    """The score "fedmia"."""

    cost = 12

    @override
    def misfit(self, view: View, knowledge: Knowledge) -> str:
        return "" if len(view.sites) > 1 else "it compares sites, and one alone took part in the run"

    @override
    def scores(self, view: View, site: str, knowledge: Knowledge, rows: Rows) -> dict[str, Scores]:
        return {"fedmia": fedmia_scores(view, site, knowledge, rows)}


def fedmia_scores(view: View, site: str, knowledge: Knowledge, rows: Rows) -> Scores:
    """(rows,) scores over the last rounds of the site.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`).
    """
    mine = deque(turns(view, site, knowledge.initial), maxlen=ROUNDS)
    others = [other for other in view.sites if other != site][:OTHERS]
    found = {turn.round: list[Turn]() for turn in mine}
    for other in others:  # one at a time, for `turns` goes through all of a site's messages
        for turn in turns(view, other, knowledge.initial):
            if turn.round in found:
                found[turn.round].append(turn)
    same = [(turn, [o for o in found[turn.round] if o.moved.keys() == turn.moved.keys()]) for turn in mine]
    used = [(turn, against) for turn, against in same if against]
    if not used:
        return np.zeros(len(rows))
    measured = [_measured(knowledge.task, [turn, *against], rows) for turn, against in used]
    return compared(measured)


def compared(measured: Sequence[Scores]) -> Scores:
    """(rows,) scores from the measurements of rounds, each (1 + others, rows), the site's own first.

    How it is done depends on the numbers of sites alone, so that a row's score does not depend on the others asked.
    """
    least = min(len(of_round) - 1 for of_round in measured)
    total = np.zeros(measured[0].shape[1])
    for of_round in measured:
        own, others = of_round[0], of_round[1:]
        gap = own - others.mean(0)
        if least >= OWN_SPREAD:
            gap = log_cdf(gap / np.maximum(others.std(0, ddof=1), _LEAST_STD))
        total += gap / len(measured)
    return total


def _measured(task: Any, of: Sequence[Turn], rows: Rows) -> Scores:
    """(turns, rows) cosines. Sites that start alike share a row's gradient."""
    found = np.zeros((len(of), len(rows)))
    left = list(range(len(of)))
    while left:
        start = of[left[0]].start
        alike = [i for i in left if _equal(of[i].start, start)]
        task.put(start)
        for column, row in enumerate(rows):
            gradient: Mapping[str, Tensor] = row_gradient(task, row)
            for i in alike:
                found[i, column] = cosine(gradient, of[i].moved)
        left = [i for i in left if i not in alike]
    return found


def _equal(one: Weights, other: Weights) -> bool:
    return one is other or all(torch.equal(w, other[name]) for name, w in one.items())
