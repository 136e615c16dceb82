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

from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.gradient_attacks import COSINE, OTHERS, GradientAttack
from fedveil.attacks.membership.lira import log_cdf
from fedveil.attacks.statistics import Scores

__all__ = [
    "OWN_SPREAD",
    "ROUNDS",
    "FedMIAAttack",
    "compare_sites",
]

ROUNDS, OWN_SPREAD = 4, 8  # most rounds that are used; others for a deviation of a row's own
_LEAST_STD = 1e-3


class FedMIAAttack(GradientAttack):
    """The score "fedmia", over the last rounds of the site."""

    cost = 12
    gauge = COSINE

    @property
    @override
    def name(self) -> str:
        return "FedMia"

    @override
    def misfit(self, view: AdversaryView, knowledge: AdversaryKnowledge) -> str:
        if len(view.sites) < 2:
            return "it compares sites, and only one took part in the run"
        return super().misfit(view, knowledge)

    @override
    def at(self, turns: ObservedClientUpdates, site: str) -> Sequence[int]:
        return range(len(turns.rounds(site)))[-ROUNDS:]

    @override
    def beside(self, turns: ObservedClientUpdates, site: str, index: int) -> Iterator[ObservedClientUpdate]:
        """And those of others in that round that sent the same tensors; none without one."""
        own, alone = turns.at(site, index), True
        for other in [other for other in turns.sites if other != site][:OTHERS]:
            for turn in turns.of_round(other, own.round):
                if turn.moved.keys() == own.moved.keys():
                    if alone:
                        yield own
                    yield turn
                    alone = False

    @override
    def combined(self, values: Sequence[Sequence[Scores]], count: int) -> dict[str, Scores]:
        measured = [np.stack([of_turn[:, 0] for of_turn in of_round]) for of_round in values]
        return {"fedmia": compare_sites(measured) if measured else np.zeros(count)}


def compare_sites(measured: Sequence[Scores]) -> Scores:
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
