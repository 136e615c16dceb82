"""Participation: tests whether the site with given examples took part in a round, using only the round's sum.

This is client-level inference: the secret is not an example but an institution's participation in training.
The adversary sees a run's models: it is another site, any recipient of the broadcasts, or the server under secure
aggregation. It sees the sum of each round, but the messages do not reveal which sites contributed. The attacker has
examples from each candidate, not necessarily those used in training, and examples from none of the candidates. It knows
the base and the method.

Client update t is an upload or a sum with start S_t and end S_t + d_t. X_k are the examples of
candidate k, and X_0 are examples from no candidate:

    p_t(X) = mean_{x in X} g(x) / |g(x)|,  g(x) = dL(x)/dS at the start                       (1)
             as in `property_inference`
    l_tk   = -<p_t(X_k) - p_t(X_0), d_t> / |d_t|                                              (2)
    in a round: s_tk = l_tk - mean_k l_tk - mean_t l_tk + mean_tk l_tk                         (3)
    at all:     a_k  = mean over rounds of max_(t in the round) (l_tk - mean_k l_tk)           (4)

(3) removes the component that all candidates share in one update, and the component that one candidate has
in every update: examples of a common kind align with every update. (4) cannot remove the second component,
since a site may have taken part in all rounds.

| the attacker needs | available from captured messages |
|---|---|
| an upload's start and end | without secure aggregation: an upload is a single-site sum (the control to win) |
| a round's sum | with secure aggregation: `secagg_views.SecureSumView`, if the method's broadcasts reveal sums |

| case | result |
|---|---|
| an update without change | l = 0 |
| only A was sent, and B was never seen | not used: examples have no gradient in A there |
| one candidate, one update | (3) is 0: there is nothing to compare it with |
| the same sites in every round, seen as sums | (3) is noise; (4) separates them from candidates that never took part |
| a candidate that never took part | (3) is noise: a control to lose |
| uploads that do not depend on the examples | (3) and (4) are noise: the second control to lose |

Noisy steps bound what an example reveals, not what a site with many examples reveals. To protect sites, noise would
have to be added to the sum, with the whole upload clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.a_factor_overlap import is_blind
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.sites.property_inference import mean_pull, score_along, subtract_named
from fedveil.attacks.statistics import Scores
from fedveil.contract.task import Rows

__all__ = ["ParticipationScores", "participation_scores"]


@dataclass(frozen=True)
class ParticipationScores:
    """The values of eq. 2.

    Attributes:
        turns: each update's round and possible contributors: the sender, or all sites asked in the round.
        candidates: names of the candidates.
        values: (turns, candidates).
    """

    turns: Sequence[tuple[int, frozenset[str]]]
    candidates: Sequence[str]
    values: Scores

    def in_a_round(self) -> Scores:
        """Return eq. 3, shape (turns, candidates): higher if the candidate is likelier to be in that update."""
        each = self.values - self.values.mean(1, keepdims=True)
        return np.asarray(each - each.mean(0, keepdims=True))

    def at_all(self) -> Scores:
        """Return eq. 4, shape (candidates,): higher if the candidate is likelier to have taken part in the run."""
        each, rounds = self.values - self.values.mean(1, keepdims=True), np.array([round_ for round_, _ in self.turns])
        return np.asarray(np.mean([each[rounds == round_].max(0) for round_ in np.unique(rounds)], 0))

    def truth(self, of: Mapping[str, str] | None = None) -> np.ndarray:
        """Return (turns, candidates), true if a candidate is in an update; `of` maps candidates to site names."""
        names = [(of or {}).get(name, name) for name in self.candidates]
        return np.array([[name in sites for name in names] for _, sites in self.turns])


def participation_scores(
    view: AdversaryView, knowledge: AdversaryKnowledge, candidates: Mapping[str, Rows], nobody: Rows
) -> ParticipationScores:
    """Compute eq. 1 and 2 for every update in the view; messages with equal start and end, as in a sum, are one update.

    The task must compute its own gradients (`fedveil.training.gradient_backend.TrainableTask`). The candidates' mean
    gradients are in memory for only one start at a time.

    Args:
        view: the server's view, of uploads or sums.
        candidates: the attacker's examples from each candidate.
        nobody: examples that belong to none of the candidates.

    Raises:
        ValueError: no candidate, a candidate without examples, `nobody` is empty, or the view has no
            readable update.
    """
    if not candidates or not len(nobody) or not all(len(rows) for rows in candidates.values()):
        raise ValueError("candidates, nobody: a candidate or `nobody` has no examples; add examples for each")
    turns, values, turn_sites = (
        ObservedClientUpdates(view, knowledge.initial),
        list[list[float]](),
        list[tuple[int, set[str]]](),
    )
    places = sorted((round_, site, index) for site in turns.sites for index, round_ in enumerate(turns.rounds(site)))
    pulls: dict[tuple[bytes, frozenset[str]], list[dict[str, Tensor]]] = {}
    known: dict[tuple[int, bytes, bytes], int] = {}  # index in `found`
    for round_, site, index in places:
        turn = turns.at(site, index)
        same = round_, turn.starts_at, turn.moves_by
        if same in known:
            turn_sites[known[same]][1].add(site)
        elif not is_blind(turn):
            start = turn.starts_at, frozenset(turn.moved)
            if start not in pulls:
                pulls = {start: _pulls(knowledge, turn, candidates, nobody)}
            known[same] = len(turn_sites)
            turn_sites.append((round_, {site}))
            values.append([score_along(direction, turn) for direction in pulls[start]])
    if not turn_sites:
        raise ValueError("view: examples have no gradient in any upload or sum; check the captured messages")
    return ParticipationScores([(r, frozenset(sites)) for r, sites in turn_sites], list(candidates), np.array(values))


def _pulls(
    knowledge: AdversaryKnowledge, turn: ObservedClientUpdate, candidates: Mapping[str, Rows], nobody: Rows
) -> list[dict[str, Tensor]]:
    """Return p_t(X_k) - p_t(X_0) for each candidate."""
    common = mean_pull(knowledge.task, turn, nobody)
    return [subtract_named(mean_pull(knowledge.task, turn, rows), common) for rows in candidates.values()]
