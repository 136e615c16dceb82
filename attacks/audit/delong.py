"""Compare two runs' scores example by example: the mean AUROC over sites, and the difference between the runs.

An example that is easy to classify is easy in both runs. So a paired comparison needs fewer examples than two separate
intervals. DeLong, DeLong and Clarke-Pearson 1988: Comparing the Areas under Two or More Correlated
Receiver Operating Characteristic Curves. Here the area is a mean over sites: each site has its own members, and all
sites have the same non-members.

    v_ij = fraction of the non-members that member j of site i scores above (ties halved),   m_i members,  K sites
    u_k  = mean over the sites of the fraction of their members that score above non-member k,   n non-members
    A = (1/K) sum_i mean_j v_ij,   var A = (1/K^2) sum_i var_j(v_ij) / m_i + var_k(u_k) / n

The variance of a difference uses the differences of v and u. It covers the choice of examples, but not the choice of
the training seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.attacks.statistics import IntervalEstimate, Scores, two_sided

Sides = tuple[Scores, Scores]  # scores of members and of non-members
ALPHA = 0.04  # for all comparisons together; below 5 % to allow for scores that are not normally distributed
_Z = 1.959964  # of 95 %
_MOST_NAME, _MOST_SITES = 300, 100_000


@dataclass(frozen=True)
class PlacementValues:
    """The placement values v and u of an area, or of a difference of two areas.

    Attributes:
        of_members: v of each site, shape (m_i,).
        of_others: u, shape (n,).
    """

    of_members: Sequence[Scores]
    of_others: Scores

    def less(self, other: PlacementValues) -> PlacementValues:
        """Return the difference from another area of the same examples. Raises ValueError if their numbers differ."""
        mine, theirs = self._rows, other._rows
        if mine != theirs:
            raise ValueError(f"expected scores of the same examples, found {mine} and {theirs}")
        pairs = zip(self.of_members, other.of_members, strict=True)
        return PlacementValues([a - b for a, b in pairs], self.of_others - other.of_others)

    @property
    def value(self) -> float:
        """Return the area, or the difference."""
        return float(np.mean([site.mean() for site in self.of_members]))

    @property
    def standard_error(self) -> float:
        """Return the standard error of the value, at least the weight of one example.

        DeLong's estimate is 0 where all examples have the same placement value; the lower limit avoids
        that.
        """
        of_members = sum(float(site.var(ddof=1)) / len(site) for site in self.of_members) / len(self.of_members) ** 2
        of_others = float(self.of_others.var(ddof=1)) / len(self.of_others)
        return max(math.sqrt(of_members + of_others), 1 / max(sum(map(len, self.of_members)), len(self.of_others)))

    def estimate(self, low: float = -1.0, high: float = 1.0) -> IntervalEstimate:
        """Return the value with its 95 % interval, clipped to [low, high]."""
        half = _Z * self.standard_error
        return IntervalEstimate(self.value, max(low, self.value - half), min(high, self.value + half))

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that the value is 0."""
        return two_sided(self.value / self.standard_error)

    @property
    def _rows(self) -> list[int]:
        return [*map(len, self.of_members), len(self.of_others)]


def placement_values(sites: Sequence[Sides]) -> PlacementValues:
    """Return the placement values of the mean area over `sites`, which have the same non-members in the same order.

    Raises:
        ValueError: no site, fewer than two examples on a side, different numbers of non-members, or a NaN.
    """
    sizes = [(len(members), len(others)) for members, others in sites]
    if not sizes or min(map(min, sizes)) < 2 or len({others for _, others in sizes}) > 1:
        raise ValueError(
            f"expected two examples or more on each side, and as many non-members at each site, found {sizes}"
        )
    if any(np.isnan(side).any() for sides in sites for side in sides):
        raise ValueError("expected scores that are numbers, found NaN")
    of_others = [1 - _above(others, members) for members, others in sites]
    return PlacementValues([_above(members, others) for members, others in sites], np.mean(of_others, axis=0))


def _above(scores: Scores, others: Scores) -> Scores:
    """Return the fraction of `others` that each score is above, ties halved; shape (scores,)."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")) / (2 * len(others))


@dataclass(frozen=True)
class SiteAveragedAuroc:
    """AUROC of one attack averaged over a run's sites, with a comparison to another run of the same examples.

    Attributes:
        attack: name of the attack.
        sites: number of sites.
        auroc: mean over the sites, with its 95 % interval.
        base: SHA-256 of the other run's audit.json; "" without a comparison.
        less: the other run's mean minus this run's, with its 95 % interval.
        p: p-value for a difference of 0, uncorrected.
    """

    attack: str
    sites: int
    auroc: tuple[float, float, float]
    base: str = ""
    less: tuple[float, float, float] = (0.0, 0.0, 0.0)
    p: float = 1.0

    @classmethod
    def from_scores(
        cls, attack: str, mine: PlacementValues, beside: PlacementValues | None = None, base: str = ""
    ) -> SiteAveragedAuroc:
        """Compute the mean from a run's placement values, compared with the run whose audit.json has digest `base`."""
        plain = cls(attack, len(mine.of_members), _triple(mine.estimate(0.0)))
        if beside is None:
            return plain
        less = beside.less(mine)
        return cls(attack, plain.sites, plain.auroc, base, _triple(less.estimate()), less.p)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> SiteAveragedAuroc:
        """Parse an entry of audit.json. Raises ValueError, KeyError or TypeError if it is malformed."""
        attack, sites, base, p = str(row["attack"])[:_MOST_NAME], int(row["sites"]), str(row["base"]), float(row["p"])
        auroc, less = _within(row["auroc"], 0.0), _within(row["less"], -1.0)
        if not 1 <= sites <= _MOST_SITES or not 0 <= p <= 1 or len(base) not in (0, 64):
            raise ValueError(f"sites {sites}, p {p}, base of {len(base)} characters")
        return cls(attack, sites, auroc, base, less, p)


def _triple(estimate: IntervalEstimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _within(value: Sequence[float], least: float) -> tuple[float, float, float]:
    middle, low, high = map(float, value)
    if not least <= low <= middle <= high <= 1:
        raise ValueError(f"expected a value in its interval, from {least:g} to 1, found {value}")
    return middle, low, high
