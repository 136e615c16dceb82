"""State which adversaries a secure aggregation run withstands.

A cohort has m sites, of which q sign the list of a sum; t shares reveal a secret; a sum has at least K sites;
and c sites collude with the server. L = max(q, K).

| adversary | sees of the other sites' uploads no more than | if |
|---|---|---|
| a server that follows the protocol (honest but curious), and c sites | one sum per round | c < t, and c <= L - 2,
  or c <= K - 2 if a table assigns sites different entries (`Method.plans_entries`);
  with neighbors, also c <= secure.max-colluders, for which every site checks the graph |
| a server that lies, and c sites | one sum per plan, with at least L - c honest sites; from all of a round's sums
  together, nothing about fewer than q - c honest sites | every site's policy names one roster, requires secure
  aggregation and admits only known code, and
  2 q > m + c, t > c, L - c >= 2 |
| a server that lies, without a roster | everything | - |

With secure.whole-cohort there are no shares: L = m in both rows, and c <= L - 2 suffices. A site then masks only once
per round, so the round has only one sum.

A server that lies chooses the run config, the cohort and the plan. So a site can count only on the minimum that its
policy accepts: `EnforcedBounds`. There c is the policy's min-colluders: every plan that passes has 2 q > m + c, t > c
and L >= c + 2, and some plan has no more than that.

Each entry is summed over at least K sites, or over none. Not claimed: entries that sites draw themselves
(`Method.has_single_site_entries`); broadcasts, if the method's messages differ by site or sites keep private state;
anything shown by the difference between two rounds' sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.federation.secagg.plan_checks import SiteRequirements

DEVIATING = "Does not hold against a server that deviates from the protocol or lies."
POLICIES_DECIDE = (
    "Against a server that deviates from the protocol or lies, it holds only as far as the sites' policies enforce it, "
    "which this record does not show; fedveil explain --policy and fedveil site status show it at each site."
)
SINGLE_SITE = (
    "With this method each site draws which entries it sends, so some entries of the sum may come from only one site: "
    "its values and its weight."
)
SINGLE_SITE_METHODS = (
    "If each site draws which entries it sends, some entries of the sum may come from only one site (fedveil explain "
    "shows whether they do)."
)
BROADCASTS = (
    "With this method, sites keep private state or get different messages: a server that lies can send some sites "
    "weights or instructions that leave one site's update alone in the sum."
)
BROADCASTS_METHODS = (
    "If sites keep private state with the method, or get different messages, a server that lies can send some sites "
    "weights or instructions that leave one site's update alone in the sum (fedveil explain shows whether they do)."
)
TWO_ROUNDS = (
    "Two rounds' sums over nearly the same sites from the same weights differ by the uploads of the sites that are not "
    "in both; only noise (dp.*) limits what that difference shows."
)


def single_site(partial: bool | None) -> str:
    """Return the sentence about sum entries from a single site, or "" if there are none. `partial`: None = unknown."""
    if partial is None:
        return SINGLE_SITE_METHODS
    return SINGLE_SITE if partial else ""


def server_learns(partial: bool | None) -> str:
    """Return a sentence on what a server that follows the protocol learns about a run's uploads."""
    exception = single_site(partial)
    return (
        "the sum over the sites of each round. Beyond it, a server that follows the protocol learns no single site's "
        f"values, number of examples, losses or norm.{' ' if exception else ''}{exception}"
    )


@dataclass(frozen=True)
class EnforcedBounds:
    """The smallest numbers in any plan that a site's policy accepts.

    Attributes:
        colluding: c, the number of sites that may collude with a server that lies.
        least: the smallest L, which is also the smallest cohort.
        quorum: the smallest q.
        entry: the smallest K: the number of sites behind an entry if sites send different entries.
    """

    colluding: int
    least: int
    quorum: int
    entry: int

    @classmethod
    def from_requirements(cls, demands: SiteRequirements) -> EnforcedBounds | None:
        """Return the bounds; None without a roster, since the server could then pose as every other site."""
        if not demands.roster:
            return None
        colluding = demands.colluding
        least = max(demands.min_cohort, demands.min_threshold, colluding + 2)
        quorum = max(demands.min_threshold, (least + colluding) // 2 + 1)
        return cls(colluding, least, quorum, max(demands.min_cohort, colluding + 2))

    @property
    def words(self) -> str:
        """Return the guarantee against a server that lies."""
        return (
            f"Holds against a server that lies {_with(self.colluding)}, if every site's policy names this roster, "
            "requires secure aggregation and admits only known code: each sum has at least "
            f"{self.least - self.colluding} honest sites, and all sums of a round together reveal nothing about "
            "fewer than "
            f"{self.quorum - self.colluding} (min-cohort, min-threshold, min-colluders). Where sites send different "
            f"entries (FedRand, FedQSN, HetLoRA, FLoRA), a single entry may come from {self.entry - self.colluding} of "
            "them. A site that lost its state, or was rolled back to an older one, counts as one that colludes with "
            "the server."
        )


@dataclass(frozen=True)
class AdversaryModel:
    """The adversaries against which an attempt protects.

    Attributes:
        quorum: q; 0 if only sums over whole cohorts can be revealed.
        threshold: t; 0 if only sums over whole cohorts can be revealed.
        least: K, the minimum number of sites in a sum.
        colluding: number of colluding sites for which every site checks the neighbor graph.
        neighbours: number of neighbors; 0 = all pairs.
        partial: the method's `has_single_site_entries`; None if the method is unknown.
        broadcasts_bound: every site in an attempt gets the same message and keeps no private state; None if the
            method is unknown.
        demands: requirements of the site for which this is stated; None if no site's policy is known, as on the server.
        plans_entries: the method's `plans_entries`: a single entry may come from only K sites; None if unknown.
    """

    quorum: int
    threshold: int
    least: int
    colluding: int
    neighbours: int
    partial: bool | None
    broadcasts_bound: bool | None
    demands: SiteRequirements | None
    plans_entries: bool | None = False

    def __post_init__(self) -> None:
        if (self.threshold < 1) != (self.quorum < 1) or self.least_in_sum < 2:
            raise ValueError(
                f"expected a threshold of 1 or more shares or no quorum, and sums of 2 or more sites, found {self}"
            )

    @property
    def least_in_sum(self) -> int:
        """Return L, the larger of q and K."""
        return max(self.quorum, self.least)

    @property
    def curious(self) -> int:
        """Return the maximum number of sites that may collude with a server that follows the protocol."""
        if not self.threshold:  # no share of any mask exists
            return self.fewest - 2
        opened = min(self.threshold - 1, self.colluding) if self.neighbours else self.threshold - 1
        return min(opened, self.fewest - 2)

    @property
    def fewest(self) -> int:
        """Return the smallest number of sites behind any summed value that the server sees."""
        return self.least_in_sum if self.plans_entries is False else self.least

    @property
    def deviating(self) -> EnforcedBounds | None:
        """Return the bounds against a server that lies; None if there are none, or no policy is known."""
        return EnforcedBounds.from_requirements(self.demands) if self.demands is not None else None

    @property
    def words(self) -> list[str]:
        """Return sentences on the guarantees, then on their limits."""
        sentences = [f"Holds against an honest but curious server {_with(self.curious)}."]
        sentences += words_for_lying_server(self.demands, self.broadcasts_bound)
        if exception := single_site(self.partial):
            sentences.append(exception)
        if self.curious == self.fewest - 2:
            of = "a sum" if self.plans_entries is False else "an entry of a sum"
            sentences.append(
                f"Does not hold against {_sites(self.fewest - 1)} with the server: {of} may have {self.fewest} sites, "
                f"and two of them must be honest ({'secure.threshold, ' if self.quorum else ''}secure.min-sites)."
            )
        return [*sentences, TWO_ROUNDS]


def words_for_lying_server(demands: SiteRequirements | None, broadcasts_bound: bool | None) -> list[str]:
    """Return sentences on a server that lies; `demands` and `broadcasts_bound` are as in `AdversaryModel`."""
    if demands is None:
        sentence = POLICIES_DECIDE
    else:
        enforced = EnforcedBounds.from_requirements(demands)
        if enforced is None:
            return [DEVIATING]
        sentence = enforced.words
    if broadcasts_bound is None:
        return [sentence, BROADCASTS_METHODS]
    return [sentence] if broadcasts_bound else [sentence, BROADCASTS]


def weakest_adversary(
    attempts: Iterable[Mapping[str, Any]],
    least: int,
    partial: bool | None,
    broadcasts_bound: bool | None,
    plans_entries: bool | None,
) -> AdversaryModel | None:
    """Return the model for a run's weakest attempt, from the server's record; None without attempts.

    Args:
        attempts: each attempt's `unseen` record (server_app/run_folder.py).
        least: the value of secure.min-sites.
        partial, broadcasts_bound, plans_entries: as in `AdversaryModel`.
    """
    adversary_models = [
        AdversaryModel(
            quorum=int(a["quorum"]),
            threshold=int(a["threshold"]),
            least=least,
            colluding=int(a["colluding"]),
            neighbours=int(a["neighbours"]),
            partial=partial,
            broadcasts_bound=broadcasts_bound,
            demands=None,
            plans_entries=plans_entries,
        )
        for a in attempts
        if "quorum" in a
    ]
    return min(adversary_models, key=lambda claim: claim.curious, default=None)


def _with(sites: int) -> str:
    return f"and up to {_sites(sites)} with it" if sites else "alone"


def _sites(count: int) -> str:
    return f"{count} site" if count == 1 else f"{count} sites"
