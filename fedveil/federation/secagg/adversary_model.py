"""State which adversary a run of secure aggregation holds against today.

A site's secrets have N holders, and any t holders can reconstruct one; a sum has at least K sites; c
sites collude with the server.

| adversary | learns only the sum of the other sites' uploads |
|---|---|
| a server that keeps to the protocol (honest but curious), and c sites | if c < t and c <= K - 2: where one other site
  alone is in it, the sum is that site's upload |
| a server that deviates from the protocol or lies | not claimed, with a roster or without |

Where not every site sends every entry (`Method.has_partial_uploads`), some entries of the sum may come
from one site. The table is about one sum. Two sums of nearly the same sites from the same weights differ
by the uploads of the sites that are not in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEVIATING = "Does not hold against a server that deviates from the protocol or lies."
SINGLE_SITE = (
    "With this method not every site sends every entry, so some entries of the sum may come from one site alone: its "
    "values and its weight."
)
SINGLE_SITE_METHODS = (
    "If the method does not have every site send every entry, some entries of the sum may come from one site alone "
    "(fedveil explain shows whether they do)."
)


def single_site(partial: bool | None) -> str:
    """Return the sentence on entries of a sum that are of one site; "" where there are none. None: method not known."""
    if partial is None:
        return SINGLE_SITE_METHODS
    return SINGLE_SITE if partial else ""


def server_learns(partial: bool | None) -> str:
    """Return what a server that keeps to the protocol learns of the uploads of a run."""
    exception = single_site(partial)
    return (
        "the sum over the sites of each round. Beyond it, a server that follows the protocol learns no single site's "
        f"values, number of examples, losses or norm.{' ' if exception else ''}{exception}"
    )


@dataclass(frozen=True)
class AdversaryModel:
    """The adversaries against which a membership protects.

    Attributes:
        holders: N.
        threshold: t.
        least: K.
        partial: the method's `has_partial_uploads`; None where the method is not known.
    """

    holders: int
    threshold: int
    least: int
    partial: bool | None

    def __post_init__(self) -> None:
        if not (1 <= self.threshold <= self.holders and self.least >= 2):
            raise ValueError(
                f"expected a threshold of 1 to {self.holders} holders, and sums of 2 or more sites, found {self}"
            )

    @property
    def curious(self) -> int:
        """Return the maximum number of sites that may collude with a server that follows the protocol."""
        return min(self.threshold - 1, self.least - 2)

    @property
    def words(self) -> list[str]:
        """Return the guarantee, then what it does not cover."""
        sentences = [f"Holds against an honest but curious server {_with(self.curious)}.", DEVIATING]
        if exception := single_site(self.partial):
            sentences.append(exception)
        if self.least - 2 < self.threshold - 1:
            sentences.append(
                f"Does not hold against {_sites(self.least - 1)} with the server: a sum may have {self.least} sites, "
                "and two of them must be honest (secure.min-sites, min-cohort)."
            )
        return sentences


def weakest_adversary(attempts: Iterable[Mapping[str, Any]], least: int, partial: bool | None) -> AdversaryModel | None:
    """Return the claim of a run's weakest attempt; None without attempts.

    Args:
        attempts: what each noted as `unseen` (server_app/run_folder.py).
        least: secure.min-sites.
        partial: the method's `has_partial_uploads`; None where the method is not known.
    """
    adversary_models = [
        AdversaryModel(int(a["holders"]), int(a["threshold"]), least, partial) for a in attempts if "holders" in a
    ]
    return min(adversary_models, key=lambda claim: claim.curious, default=None)


def _with(sites: int) -> str:
    return f"and up to {_sites(sites)} with it" if sites else "alone"


def _sites(count: int) -> str:
    return f"{count} site" if count == 1 else f"{count} sites"
