"""Participation: did the site that holds these rows take part in a round, of which the sum alone was seen?

Client-level inference: the secret is not a row, it is that an institution was among those that trained. An adversary
who sees a run's models (another site, whoever gets the broadcasts, the server under secure aggregation) sees the sum of
each round; who was in it the messages do not say. The attacker has rows of each candidate, which need not be those that
it trained on, and rows of none, and knows base and method.

Of turn t, an upload or a sum with start S_t and end S_t + d_t, and of candidate k with rows X_k, rows of none X_0:

    p_t(X) = mean_{x in X} g(x) / |g(x)|,  g(x) = dL(x)/dS at the start                       (1) as in `property`
    l_tk   = -<p_t(X_k) - p_t(X_0), d_t> / |d_t|                                              (2)
    in a round: s_tk = l_tk - mean_k l_tk - mean_t l_tk + mean_tk l_tk                         (3)
    at all:     a_k  = mean over rounds of max_(t in the round) (l_tk - mean_k l_tk)           (4)

(3) takes away what all candidates have in common at a turn, and what a candidate has in common with every turn: rows of
a common kind lie along every move. (4) cannot take away the second, since a site may have taken part in all rounds.

| the attacker needs to see | in the tap of a run that is |
|---|---|
| an upload's start and end | in the clear: each upload is a sum of one site (the control that it must win) |
| a round's sum | under secure aggregation: `unseen.SumView`, of methods whose broadcasts show their sums |

| case | result |
|---|---|
| a turn that moved nothing | l = 0 |
| A alone was sent, and B was never seen | no turn: rows have no gradient in A there |
| one candidate, one turn | (3) is 0: there is nothing to set it apart from |
| the same sites in every round, seen as sums | (3) is noise; (4) tells them from who never took part |
| a candidate that never took part | (3) is noise: the control that it must lose |
| uploads that hold nothing of the rows | (3) and (4) are noise: the other control that it must lose |

Noisy steps bound what a row shows, not what a site of many rows shows; noise for sites would be of the sum, by a clip
of the whole upload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.membership.overlap import is_blind
from fedveil.attacks.membership.turns import Turn, Turns
from fedveil.attacks.sites.property import along, less, mean_pull
from fedveil.attacks.statistics import Scores
from fedveil.contract.task import Rows


@dataclass(frozen=True)
class Leanings:
    """Eq. 2.

    Attributes:
        turns: round, and the sites that are known to be behind it: who sent the upload, or was asked in the round.
        candidates: their names.
        values: (turns, candidates).
    """

    turns: Sequence[tuple[int, frozenset[str]]]
    candidates: Sequence[str]
    values: Scores

    def in_a_round(self) -> Scores:
        """(turns, candidates) of eq. 3: higher where the candidate is likelier in that turn."""
        each = self.values - self.values.mean(1, keepdims=True)
        return np.asarray(each - each.mean(0, keepdims=True))

    def at_all(self) -> Scores:
        """(candidates,) of eq. 4: higher where the candidate is likelier to have taken part in the run."""
        each, rounds = self.values - self.values.mean(1, keepdims=True), np.array([round_ for round_, _ in self.turns])
        return np.asarray(np.mean([each[rounds == round_].max(0) for round_ in np.unique(rounds)], 0))

    def truth(self, of: Mapping[str, str] | None = None) -> np.ndarray:
        """(turns, candidates) whether each was in each turn; `of` names the site whose turns a candidate is given."""
        names = [(of or {}).get(name, name) for name in self.candidates]
        return np.array([[name in sites for name in names] for _, sites in self.turns])


def leanings(view: View, knowledge: Knowledge, candidates: Mapping[str, Rows], nobody: Rows) -> Leanings:
    """Eq. 1 and 2 for every turn in the view. Messages that start and end alike, as those of a sum do, are one turn.

    The task must train by gradients of its own (`fedveil.training.computing.Trainable`). Held at a time: the mean
    gradients of all candidates at one start.

    Args:
        view: the server's, of uploads or of sums.
        candidates: rows of each, as the attacker holds them.
        nobody: rows of no candidate.

    Raises:
        ValueError: no candidate, a candidate without rows, no rows of nobody, or a view without a turn to read.
    """
    if not candidates or not len(nobody) or not all(len(rows) for rows in candidates.values()):
        raise ValueError("candidates, nobody: expected rows of each, found none of one; name rows for every candidate")
    turns, values, found = Turns(view, knowledge.initial), list[list[float]](), list[tuple[int, set[str]]]()
    places = sorted((round_, site, index) for site in turns.sites for index, round_ in enumerate(turns.rounds(site)))
    pulls: dict[tuple[bytes, frozenset[str]], list[dict[str, Tensor]]] = {}
    known: dict[tuple[int, bytes, bytes], int] = {}  # place in `found`
    for round_, site, index in places:
        turn = turns.at(site, index)
        same = round_, turn.starts_at, turn.moves_by
        if same in known:
            found[known[same]][1].add(site)
        elif not is_blind(turn):
            start = turn.starts_at, frozenset(turn.moved)
            if start not in pulls:
                pulls = {start: _pulls(knowledge, turn, candidates, nobody)}
            known[same] = len(found)
            found.append((round_, {site}))
            values.append([along(direction, turn) for direction in pulls[start]])
    if not found:
        raise ValueError("view: expected an upload or a sum that rows have a gradient in, found none; see the tap")
    return Leanings([(r, frozenset(sites)) for r, sites in found], list(candidates), np.array(values))


def _pulls(knowledge: Knowledge, turn: Turn, candidates: Mapping[str, Rows], nobody: Rows) -> list[dict[str, Tensor]]:
    """p_t(X_k) - p_t(X_0) of each candidate."""
    common = mean_pull(knowledge.task, turn, nobody)
    return [less(mean_pull(knowledge.task, turn, rows), common) for rows in candidates.values()]
