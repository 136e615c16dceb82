"""Property inference: ranks sites by their share of examples with a property, from their uploads.

Ateniese et al. 2015; Melis, Song, De Cristofaro, Shmatikov 2019 (arXiv 1805.04049). Sums over changing
cohorts: So et al. 2021 (arXiv 2106.03328); Lam et al. 2021, "Gradient Disaggregation" (arXiv 2106.06089).

The attacker has its own examples, some with the property and some without; none belong to a site. At the
start of a client update t, it computes the direction in which each kind pushes the sent tensors
S. It then measures how far the site moved along the difference between these directions:

    u_t = mean_{x with} g(x) / |g(x)| - mean_{x without} g(x) / |g(x)|,   g(x) = dL(x)/dS at the start     (1)
    l_t = -<u_t, S_sent - S_start> / |S_sent - S_start|                                                     (2)

A site's estimate is z_k of

    min_{z, o} sum_t (l_t - o_{g(t)} - mean_{k in C_t} z_k)^2 + ridge sum_k z_k^2                           (3)

| the server sees | C_t | g(t), the updates that share an offset |
|---|---|---|
| uploads | the site | updates in a round with the same sent tensors |
| sums | the sites in the round's cohort | all rounds: sites differ by the rounds in which they took part |

An estimate ranks sites; it is not a share. `pairwise_concordance` gives the fraction of correctly ordered
pairs.

| case | result |
|---|---|
| an update without change | l = 0 |
| only A was sent, and B was never seen | no l, because examples have no gradient in A there |
| sums over the same cohort in every round | the estimates are equal: concordance 0.5 |
| no other site ever sent the same tensors in the same round | the site's estimate is 0 |
| two sites with equal shares | `pairwise_concordance` ignores this pair |
| a site without an update | no estimate |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.a_factor_overlap import is_blind
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.per_example_gradients import row_gradients
from fedveil.contract.task import Rows

__all__ = ["PropertyScore", "estimate_from_sums", "estimate_from_uploads", "pairwise_concordance", "property_scores"]

Estimates = Mapping[str, float]  # by site
RIDGE = 0.1  # ridge of eq. 3: a sum over many sites reveals little about each site
_EQUAL = 1e-9  # l lies between -2 and 2; smaller differences are rounding


@dataclass(frozen=True)
class PropertyScore:
    """Eq. 2 for one client update: how far the sent tensors moved in the direction of examples with the property."""

    round: int
    site: str
    value: float
    sent: frozenset[str] = frozenset()  # names of the tensors


def property_scores(
    view: AdversaryView, knowledge: AdversaryKnowledge, having: Rows, lacking: Rows
) -> list[PropertyScore]:
    """Compute eq. 1 and 2 for every update in the view; updates with equal starts share per-example gradients.

    The task must compute its own gradients (`fedveil.training.gradient_backend.TrainableTask`).
    """
    turns, scores = ObservedClientUpdates(view, knowledge.initial), list[PropertyScore]()
    places = sorted((round_, site, index) for site in turns.sites for index, round_ in enumerate(turns.rounds(site)))
    known: dict[tuple[bytes, frozenset[str]], dict[str, Tensor]] = {}
    for round_, of_round in itertools.groupby(places, key=lambda place: place[0]):
        known.clear()  # later rounds start from other weights
        for _, site, index in of_round:
            turn = turns.at(site, index)
            if is_blind(turn):
                continue
            key = turn.starts_at, frozenset(turn.moved)
            if key not in known:
                known[key] = _direction(knowledge.task, turn, having, lacking)
            scores.append(PropertyScore(round_, site, score_along(known[key], turn), key[1]))
    return scores


def _direction(task: Any, turn: ObservedClientUpdate, having: Rows, lacking: Rows) -> dict[str, Tensor]:
    """Compute eq. 1 over the tensors that were sent."""
    return subtract_named(mean_pull(task, turn, having), mean_pull(task, turn, lacking))


def mean_pull(task: Any, turn: ObservedClientUpdate, rows: Rows) -> dict[str, Tensor]:
    """Return the mean of g(x) / |g(x)| over examples at an update's start, for sent tensors; zero gradients add 0."""
    total: dict[str, Tensor] = {}
    task.put(turn.start)
    for _, example_grads in row_gradients(task, rows):
        gradient = {n: g.double() for n, g in example_grads.items() if n in turn.moved}
        length = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        for name, g in gradient.items() if length else ():
            total[name] = total.get(name, 0.0) + g / (length * len(rows))
    return total


def subtract_named(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a - b; a name that is missing from one of them counts as 0."""
    names = [*a, *(name for name in b if name not in a)]
    return {n: a[n] - b[n] if n in a and n in b else (a[n] if n in a else -b[n]) for n in names}


def score_along(direction: Mapping[str, Tensor], turn: ObservedClientUpdate) -> float:
    """Compute eq. 2."""
    length = math.sqrt(sum(float(d.double().square().sum()) for d in turn.moved.values()))
    dot = sum(float((u * turn.moved[name].double()).sum()) for name, u in direction.items())
    return -dot / length if length else 0.0


def estimate_from_uploads(found: Sequence[PropertyScore]) -> Estimates:
    """Solve eq. 3 for uploads."""
    return _solved([((each.site,), each.value, (each.round, each.sent)) for each in found])


def estimate_from_sums(found: Sequence[PropertyScore]) -> Estimates:
    """Solve eq. 3 for sums: all of a round's values l equal the value of its sum, where each site has equal weight."""
    rounds = sorted({each.round for each in found})
    cohorts = {t: tuple(each.site for each in found if each.round == t) for t in rounds}
    values = {each.round: each.value for each in found}
    return _solved([(cohorts[t], values[t], None) for t in rounds])


def _solved(seen: Sequence[tuple[tuple[str, ...], float, Hashable]]) -> Estimates:
    """Solve eq. 3 for (C_t, l_t, g(t))."""
    sites, groups = sorted({site for of, _, _ in seen for site in of}), list({group: None for _, _, group in seen})
    asked, targets = np.zeros((len(seen) + len(sites), len(sites) + len(groups))), np.zeros(len(seen) + len(sites))
    for t, (of, value, group) in enumerate(seen):
        for site in of:
            asked[t, sites.index(site)] = 1 / len(of)
        asked[t, len(sites) + groups.index(group)], targets[t] = 1.0, value
    asked[len(seen) :, : len(sites)] = math.sqrt(RIDGE) * np.eye(len(sites))
    solved = np.linalg.lstsq(asked, targets, rcond=None)[0]
    return dict(zip(sites, map(float, solved), strict=False))


def pairwise_concordance(found: Estimates, shares: Mapping[str, float]) -> float:
    """Return the fraction of site pairs that the estimates order like the true shares, ties halved; 0.5 is a guess.

    Raises:
        ValueError: no two sites with estimates have different shares.
    """
    pairs = [(a, b) for a, b in itertools.combinations(sorted(found), 2) if shares[a] != shares[b]]
    if not pairs:
        raise ValueError("shares: no two sites with estimates have different shares")
    right = [
        0.5 if abs(found[a] - found[b]) < _EQUAL else float((found[a] > found[b]) == (shares[a] > shares[b]))
        for a, b in pairs
    ]
    return math.fsum(right) / len(right)
