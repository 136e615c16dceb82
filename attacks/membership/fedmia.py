"""FedMIA: an example is a site's member if its gradient aligns more with that site's upload than with the others'.

Zhu, Li, Gu, Yao, Fan, Han: FedMIA: An Effective Membership Inference Attack Exploiting "All for One" Principle in
Federated Learning. CVPR 2025, arXiv 2402.06289. We had only the paper's abstract, the start of its text, and the
README.

At most one site has any given example, so the uploads of all other sites give the null distribution.

    M_k(x) = cosine of -dL(x)/dS at the start with the update of site k, S = the tensors it sent (see `alignment`)
    z_t(x) = (M_site - mean of the others' M) / deviation of the others' M        in round t
    score  = mean over rounds of ln Phi(z_t)                                      other sites are the null distribution

| case | result |
|---|---|
| fewer than OWN_SPREAD others in a used round | M_site - mean of the others' M: few values give a noisy deviation |
| a round in which no other site sent the same tensors | not used |
| no usable round | 0 for every example |
| one site | the audit skips the attack |
| others with bit-identical values | a minimum deviation of 1e-3 |

Adaptive note: unlike in `alignment`, the gradient component shared by all examples of the task cancels. Sites with
examples of another kind give a bad null distribution, which the wrong-site control reveals. Under FedRand, "the others"
are the sites that drew the same factor. Differences from the paper: one measurement, and only the last ROUNDS; the rule
for few others is ours.
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

ROUNDS, OWN_SPREAD = 4, 8  # maximum number of rounds; minimum number of others for a deviation per example
_LEAST_STD = 1e-3


class FedMIAAttack(GradientAttack):
    """The score "fedmia", over the site's last rounds."""

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
        """Yield the update itself and those of other sites that sent the same tensors in that round, or
        nothing if there are none."""
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
    """Return scores from each round's measurements, of shape (1 + others, rows) with the site's own values first.

    The rule depends only on the number of sites, so an example's score does not depend on the other examples.
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
