"""Compare two runs' scores example by example: the mean AUROC over sites, and the difference between the runs.

An example that is easy to classify is easy in both runs. So a paired comparison needs fewer examples than two separate
intervals. DeLong, DeLong and Clarke-Pearson 1988: Comparing the Areas under Two or More Correlated
Receiver Operating Characteristic Curves. Here the area is a mean over sites: each site has its own members, and all
sites share the same non-members.

    v_ij = fraction of non-members below member j of site i in score (ties halved),   m_i members,  K sites
    u_k  = mean over the sites of the fraction of their members that score above non-member k,   n non-members
    A = (1/K) sum_i mean_j v_ij,   var A = (1/K^2) sum_i var_j(v_ij) / m_i + var_k(u_k) / n

The variance of a difference uses the differences of v and u. It covers the choice of examples, but not the choice of
the training seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedveil.attacks.statistics import Scores, two_sided

Sides = tuple[Scores, Scores]  # scores of members and of non-members
ALPHA = 0.01  # error rate of all comparisons together
_MOST_NAME, _MOST_SITES, _MOST_COMPARISONS = 300, 100_000, 1000


@dataclass(frozen=True)
class NormalEstimate:
    """A value with its standard error, assumed to be normally distributed."""

    value: float
    standard_error: float

    def interval(self, alpha: float, low: float = -1.0, high: float = 1.0) -> tuple[float, float]:
        """Return the two-sided interval of 1 - alpha, clipped to [low, high]."""
        half = NormalDist().inv_cdf(1 - alpha / 2) * self.standard_error
        return max(low, self.value - half), min(high, self.value + half)

    def lower_bound(self, alpha: float) -> float:
        """Return the one-sided lower bound of 1 - alpha."""
        return self.value - NormalDist().inv_cdf(1 - alpha) * self.standard_error

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that the value is 0."""
        return two_sided(self.value / self.standard_error)

    @classmethod
    def read(cls, row: Mapping[str, Any], least: float) -> NormalEstimate:
        """Parse an entry of audit.json. Raises ValueError, KeyError or TypeError unless its value is `least` to 1."""
        value, error = float(row["value"]), float(row["standard_error"])
        if not least <= value <= 1 or not 0 < error <= 1:
            raise ValueError(f"the value must be from {least:g} to 1, with a standard error; found {value} and {error}")
        return cls(value, error)


@dataclass(frozen=True)
class PlacementValues:
    """The placement values v and u of an area, or of a difference between two areas.

    Attributes:
        of_members: v of each site, shape (m_i,).
        of_others: u, shape (n,).
    """

    of_members: Sequence[Scores]
    of_others: Scores

    def less(self, other: PlacementValues) -> PlacementValues:
        """Return the difference from another area of the same examples. Raises ValueError if their counts differ."""
        mine, theirs = self._rows, other._rows
        if mine != theirs:
            raise ValueError(f"the runs have different numbers of scores: {mine} and {theirs}")
        pairs = zip(self.of_members, other.of_members, strict=True)
        return PlacementValues([a - b for a, b in pairs], self.of_others - other.of_others)

    @property
    def value(self) -> float:
        """Return the area, or the difference."""
        return float(np.mean([site.mean() for site in self.of_members]))

    @property
    def standard_error(self) -> float:
        """Return the standard error of the value, which is at least the weight of one example.

        DeLong's estimate is 0 if all examples have the same placement value; the lower limit prevents that.
        """
        of_members = sum(float(site.var(ddof=1)) / len(site) for site in self.of_members) / len(self.of_members) ** 2
        of_others = float(self.of_others.var(ddof=1)) / len(self.of_others)
        return max(math.sqrt(of_members + of_others), 1 / max(sum(map(len, self.of_members)), len(self.of_others)))

    @property
    def estimate(self) -> NormalEstimate:
        """Return the value with its standard error."""
        return NormalEstimate(self.value, self.standard_error)

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
            f"each side needs at least two examples, and all sites the same number of non-members; found {sizes}"
        )
    if any(np.isnan(side).any() for sides in sites for side in sides):
        raise ValueError("some scores are NaN")
    of_others = [1 - _above(others, members) for members, others in sites]
    return PlacementValues([_above(members, others) for members, others in sites], np.mean(of_others, axis=0))


def _above(scores: Scores, others: Scores) -> Scores:
    """Return, for each score, the fraction of `others` below it, counting ties as half; shape (scores,)."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")) / (2 * len(others))


@dataclass(frozen=True)
class SitePlacements:
    """One attack on all sites of a run.

    Attributes:
        sites: placement values of each site's own examples, by site.
        wrong: placement values of the same examples on another site's upload; no entry if there is no such upload.
        mean: placement values of the mean over the sites.
    """

    sites: Mapping[str, PlacementValues]
    wrong: Mapping[str, PlacementValues]
    mean: PlacementValues

    @classmethod
    def from_scores(cls, own: Mapping[str, Sides], wrong: Mapping[str, Sides]) -> SitePlacements:
        """Compute the values from the scores of each site. Raises ValueError like `placement_values`."""
        return cls(
            {site: placement_values([sides]) for site, sides in own.items()},
            {site: placement_values([sides]) for site, sides in wrong.items()},
            placement_values([*own.values()]),
        )


@dataclass(frozen=True)
class SiteAuroc:
    """AUROC of one attack at one site.

    Attributes:
        site: name of the site.
        auroc: AUROC on the server's data about this site: its upload, or the sum that contains it.
        less_wrong: the AUROC minus the AUROC of the same examples on another site's upload, or None if there is no such
            upload.
        members, non_members: numbers of examples.
    """

    site: str
    auroc: NormalEstimate
    less_wrong: NormalEstimate | None
    members: int
    non_members: int

    @classmethod
    def from_placements(cls, site: str, own: PlacementValues, wrong: PlacementValues | None) -> SiteAuroc:
        """Compute the values of one site."""
        less = own.less(wrong).estimate if wrong else None
        return cls(site, own.estimate, less, len(own.of_members[0]), len(own.of_others))

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> SiteAuroc:
        """Parse an entry of audit.json. Raises ValueError, KeyError or TypeError if it is malformed."""
        less = row["less_wrong"]
        members, non_members = int(row["members"]), int(row["non_members"])
        if min(members, non_members) < 1:
            raise ValueError(f"members {members}, non_members {non_members}")
        return cls(
            str(row["site"])[:_MOST_NAME], NormalEstimate.read(row["auroc"], 0.0),
            None if less is None else NormalEstimate.read(less, -1.0), members, non_members,
        )  # fmt: skip


@dataclass(frozen=True)
class RunDifference:
    """Comparison of a run with another run on the same examples.

    Attributes:
        base: SHA-256 of the other run's audit.json.
        less: the other run's mean minus this run's.
    """

    base: str
    less: NormalEstimate

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> RunDifference:
        """Parse an entry of audit.json. Raises ValueError, KeyError or TypeError if it is malformed."""
        base = str(row["base"])
        if len(base) != 64:
            raise ValueError(f"base of {len(base)} characters")
        return cls(base, NormalEstimate.read(row["less"], -1.0))


@dataclass(frozen=True)
class SiteAveragedAuroc:
    """AUROC of one attack on a run: per site, over all sites, and compared with other runs on the same examples.

    Attributes:
        attack: name of the attack.
        mean: mean over the sites.
        sites: AUROC per site, in the run's order.
        differences: comparisons with other runs.
    """

    attack: str
    mean: NormalEstimate
    sites: Sequence[SiteAuroc]
    differences: Sequence[RunDifference] = ()

    @classmethod
    def from_placements(
        cls, attack: str, mine: SitePlacements, bases: Mapping[str, SitePlacements] | None = None
    ) -> SiteAveragedAuroc:
        """Compute the values, and compare them with the runs in `bases`, keyed by the SHA-256 of their audit.json."""
        sites = [SiteAuroc.from_placements(site, own, mine.wrong.get(site)) for site, own in mine.sites.items()]
        differences = [
            RunDifference(digest, base.mean.less(mine.mean).estimate) for digest, base in (bases or {}).items()
        ]
        return cls(attack, mine.mean.estimate, sites, differences)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> SiteAveragedAuroc:
        """Parse an entry of audit.json. Raises ValueError, KeyError or TypeError if it is malformed."""
        sites, differences = row["sites"], row["differences"]
        if not 1 <= len(sites) <= _MOST_SITES or len(differences) > _MOST_COMPARISONS:
            raise ValueError(f"{len(sites)} sites, {len(differences)} comparisons")
        return cls(
            str(row["attack"])[:_MOST_NAME], NormalEstimate.read(row["mean"], 0.0),
            [SiteAuroc.read(site) for site in sites], [RunDifference.read(other) for other in differences],
        )  # fmt: skip
