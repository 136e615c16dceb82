"""Multi-Krum: the mean of the uploads that are closest to many others (Blanchard et al. 2017).

| paper | code | shape, unit |
|---|---|---|
| n | uploads in the round | at least 2 f + 3 |
| f | `hostile` | uploads that may be arbitrary, at least 1 |
| m | `best` | number of uploads averaged, at most n - f - 2; 0 means n - f - 2 |
| V_i | all terms of an upload, as one vector | decoded, in the form in which they are added |
| s(i) | sum of ||V_i - V_j||^2 over the n - f - 2 uploads j nearest to i | |

The m uploads with the smallest s are averaged. Among uploads with equal s, the client name that sorts
first wins.

Formal guarantees, if at most f of the n uploads are hostile, and D is the largest distance between any two
others:

1. The result is the equally weighted mean of m of the uploads.
2. Each of these m lies within D sqrt((n - f - 2) / (n - 2 f - 1)) of an upload that is not hostile. The
   reason: s of an upload that is not hostile is at most (n - f - 2) D^2, and there are more than m such
   uploads. Among the uploads nearest to a hostile one, n - 2 f - 1 are not hostile. So hostile uploads
   further away than this are never averaged, even if all f of them collude.

This bounds the distance over all entries together, not for any single entry. Within D, a hostile upload may
put its whole distance into one entry, where the median would stop it. If examples differ a lot between
sites, D is large, and an honest site whose data differ from the others' is left out.

| case | result |
|---|---|
| fewer than 2 f + 3 uploads | ConfigError; a run refuses such a cohort before it trains
  (`fedveil.federation.aggregation_rules`) |
| a term with a mask | ConfigError: the sender chooses its mask, and a hostile upload that shares few entries with the
  others would be close to all of them over the shared entries |
| uploads with different names | ConfigError, for the same reason |
| weights | not used: a client could claim any weight; `weight`, `examples` and `clear` still report all of them |
| all uploads equal | the result is that upload, bit for bit |
| the order of arrival | has no effect |
| memory | all values of the round, plus n blocks in fp64; distances hold n^2 numbers |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedveil.contract.contributions import ClientContributions
from fedveil.errors import ConfigError
from fedveil.ops.running_sums import RunningSums

_BLOCK = 1 << 16  # entries


def min_uploads(hostile: int, best: int = 0) -> int:
    """Return the minimum number of uploads: the larger of 2 f + 3 and f + m + 2."""
    return max(2 * hostile + 3, hostile + best + 2)


@final
class MultiKrumAggregator:
    """Implements `fedveil.contract.contributions.AggregateSums`; `best` = 0 averages n - f - 2 uploads."""

    def __init__(self, hostile: int, best: int = 0) -> None:
        self._hostile, self._best = hostile, best
        self._held: dict[str, dict[str, Tensor]] = {}
        self._weight: dict[str, float] = {}
        self.examples = 0
        self.clear: dict[str, Mapping[str, str | float]] = {}

    def add(self, client: str, num_examples: int, terms: ClientContributions) -> None:
        """Store all of one client's terms. Raises ConfigError for terms that cannot be compared with the others'."""
        values: dict[str, Tensor] = {}
        for term in terms.tensors:
            if term.mask is not None:
                raise ConfigError(_NOT_COMPARABLE + f"a mask on {term.name}; choose another rule")
            values[term.name] = term.value
            self._weight[term.name] = self._weight.get(term.name, 0.0) + term.weight
        first = next(iter(self._held.values()), values)
        if first.keys() != values.keys():
            raise ConfigError(_NOT_COMPARABLE + f"{sorted(first)} and {sorted(values)}; choose another rule")
        self._held[client] = values
        self.examples += num_examples
        self.clear[client] = terms.clear

    def __contains__(self, name: str) -> bool:
        return name in self._weight

    def weight(self, name: str) -> float:
        """Return the sum of the weights that clients gave; 0.0 if no client sent the name."""
        return self._weight.get(name, 0.0)

    @cached_property
    def chosen(self) -> list[str]:
        """Return the sorted clients whose uploads are averaged. Raises ConfigError below `min_uploads`."""
        clients, least = sorted(self._held), min_uploads(self._hostile, self._best)
        if len(clients) < least:
            raise ConfigError(
                f"aggregate.num-byzantine: expected at least {least} uploads, found {len(clients)}; lower it"
            )
        best = self._best or len(clients) - self._hostile - 2
        scores = krum_scores(squared_distances([self._held[client] for client in clients]), self._hostile)
        return sorted(clients[i] for i in scores.argsort(stable=True)[:best].tolist())

    @cached_property
    def _mean(self) -> RunningSums:
        mean = RunningSums()
        for client in self.chosen:
            for name, value in self._held[client].items():
                mean.fold(name, value, 1.0)
        self._held.clear()
        return mean

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """Return the equally weighted mean of the chosen uploads, fp32."""
        return self._mean.mean(name)

    def take(self, name: str) -> Float[Tensor, "..."]:
        """Remove the mean from the sums and return it."""
        return self._mean.take(name)

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """Return True everywhere."""
        return self._mean.moved(name)

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the result for every name of `otherwise`, in its dtype; its own tensor if no client sent the name."""
        return self._mean.means(otherwise)


_NOT_COMPARABLE = 'aggregate.rule: expected uploads of the same entries for "multi-krum", found '


def squared_distances(uploads: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, "n n"]:
    """Return ||V_i - V_j||^2, fp64, for uploads with the same names and shapes, block by block."""
    n = len(uploads)
    distances = torch.zeros(n, n, dtype=torch.float64)
    for name in sorted(uploads[0]):
        flat = [upload[name].reshape(-1) for upload in uploads]
        for start in range(0, len(flat[0]), _BLOCK):
            rows = torch.stack([value[start : start + _BLOCK].double() for value in flat])
            for i in range(n - 1):
                distances[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1)
    return distances + distances.T


def krum_scores(distances: Float[Tensor, "n n"], hostile: int) -> Float[Tensor, " n"]:
    """Return s: for each upload, the sum of its n - f - 2 smallest squared distances to other uploads."""
    n = len(distances)
    others = distances.masked_fill(torch.eye(n, dtype=torch.bool), torch.inf)
    return others.sort(1).values[:, : n - hostile - 2].sum(1)
